"""Tables of published results for comparison, with their sources.

"second-hand" means read in several agreeing notes, not in the paper. None of them used our data or
our sizes: only the shape can be compared.
"""

from collections.abc import Mapping

from experiments.report.blocks import COMPARE_THE_SHAPE, Row, Table

BRITZ = "Britz et al. 2017, arXiv 1703.03906 (second-hand), newstest2013"
BAHDANAU = "Bahdanau et al. 2014, arXiv 1409.0473 (second-hand)"
LUONG = "Luong et al. 2015, arXiv 1508.04025, WMT14 en-de"
LUONG_ERROR = "0.34–0.39"  # alignment error rate
VASWANI = "Vaswani et al. 2017, arXiv 1706.03762"
RABE_STAATS = "Rabe & Staats 2021, arXiv 2112.05682, TPUv3, one head, gradient"
LRA = "Tay et al. 2020, arXiv 2011.04006 (second-hand), Long Range Arena"

# Depth: sd of q·k; then entropy / ln n, largest weight, Jacobian norm for the three scores.
# q, k ~ N(0, 1), 32 keys, 400 queries; None where no figure is given.
UNTRAINED = {
    4: (2.01, (0.662, 0.335, 0.301), (0.877, 0.155, None), (0.986, 0.055, None)),
    64: (8.03, (0.145, 0.813, 0.164), (0.868, 0.166, None), (0.958, 0.086, None)),
    256: (16.3, (0.067, 0.907, 0.012), (0.865, 0.170, None), (0.964, 0.081, None)),
    1024: (32.1, (0.024, 0.969, 0.0000), (0.868, 0.170, None), (0.960, 0.085, None)),
}


def _rows(text: str) -> list[Row]:
    lines = text.strip().splitlines()
    return [Row([cell.strip() for cell in line.split("|")], published=True) for line in lines]


def _table(what: str, source: str, columns: str, rows: list[Row], note: str = "") -> Table:
    caption = f"Published: {what} ({source}): {COMPARE_THE_SHAPE}"
    return Table(caption, columns.split("|"), rows, note)


def britz(ours: Mapping[str, str]) -> Table:
    """BLEU by depth of the score; ours, which has one depth, in the first column."""
    rows = _rows("""
        multiplicative (unscaled dot) | 22.03 ± 0.08 | 22.33 ± 0.28 | 21.78 ± 0.05 | 18.22 ± 0.03
        additive | 22.23 ± 0.11 | 22.33 ± 0.04 | 22.47 ± 0.27 | 22.10 ± 0.18
        none: state, at one depth | 9.98 ± 0.28 | | |
        none: input, at one depth | 11.57 ± 0.30 | | |
        """)
    rows += [Row([name, bleu, "", "", ""]) for name, bleu in ours.items()]
    return _table(
        "BLEU by depth of the score", BRITZ, "type|128|256|512|1024", rows,
        "Ours has one depth, put into the first column. It adds the line the paper lacks, the "
        "scaled dot.",
    )  # fmt: skip


def bahdanau() -> Table:
    """BLEU without and with additive attention."""
    rows = _rows("""
        encoder-decoder (no attention), trained to 30 words | 13.93 | 24.19
        search (additive), trained to 30 words | 21.50 | 31.44
        encoder-decoder (no attention), trained to 50 words | 17.82 | 26.71
        search (additive), trained to 50 words | 26.75 | 34.16
        """)
    return _table(
        "BLEU without and with additive attention", BAHDANAU, "system|all|no unknown words", rows,
        "Their Figure 2: without attention BLEU falls past 30 words, with it there is no fall at "
        "50.",
    )  # fmt: skip


def luong() -> Table:
    """Attention by score."""
    rows = _rows("""
        global, location | 6.4 | 18.1 | 19.3
        global, dot | 6.1 | 18.6 | 20.5
        global, general | 6.1 | 17.3 | 19.1
        local-m, general | 6.2 | 18.6 | 20.4
        local-p, dot | 6.6 | 18.0 | 19.6
        local-p, general | 5.9 | 19 | 20.9
        """)
    columns = "attention|perplexity|BLEU|after replacing unknown words"
    note = "Concat has no BLEU row there (perplexity 6.7, a footnote)."
    return _table("attention by score", LUONG, columns, rows, note)


def rabe_staats() -> Table:
    """Memory overhead of dot-product attention."""
    rows = _rows("""
        standard attention | 532 KB | 8 MB | 128 MB | 2 GB | out of memory
        memory-efficient attention | 532 KB | 8 MB | 41 MB | 64 MB | 257 MB
        its speed against standard | ±5 % | ±5 % | −30 % | −35 % | –
        """)
    return _table(
        "memory overhead of dot-product attention", RABE_STAATS,
        "form|256|1,024|4,096|16,384|65,536", rows,
        "They report 59 times less overhead in inference and 32 times in differentiation at length "
        "16,384.",
    )  # fmt: skip


def arena(ours: Mapping[str, str]) -> Table:
    """The averages of Long Range Arena beside our means over the tasks, by our names."""
    averages = _rows("""
        full | Transformer | 54.39
        window | local attention | 46.06
        longformer | Longformer | 53.46
        low-rank | Linformer | 51.36
        lsh | Reformer | 50.67
        bigbird | BigBird | 55.01
        linear-elu | linear Transformer | 50.55
        linear-favor | Performer | 51.41
        """)
    rows = [
        Row([name, average, ours.get(key, "–")], published=True)
        for key, name, average in (row.cells for row in averages)
    ]
    columns = "model|published, %|ours, mean over our tasks"
    return _table("average over the tasks", LRA, columns, rows)
