"""Figures from the papers beside which ours stand, with their sources.

Rows are `experiments.report.Row`s marked ``published``; "second-hand" means read in several
agreeing notes, not in the paper. None of them ran on our data or at our size: what to compare is
the shape.
"""

from experiments.report.blocks import Row

BRITZ = "Britz et al. 2017, arXiv 1703.03906 (second-hand), newstest2013"
BAHDANAU = "Bahdanau et al. 2014, arXiv 1409.0473 (second-hand)"
LUONG = "Luong et al. 2015, arXiv 1508.04025, WMT14 en-de"
VASWANI = "Vaswani et al. 2017, arXiv 1706.03762"
RABE_STAATS = "Rabe & Staats 2021, arXiv 2112.05682, TPUv3, one head, gradient"

# BLEU by the depth of the score: 128, 256, 512, 1024. The multiplicative score is unscaled.
BRITZ_DEPTHS = (128, 256, 512, 1024)
BRITZ_ROWS = (
    Row(["multiplicative (unscaled dot)", "22.03 ± 0.08", "22.33 ± 0.28", "21.78 ± 0.05",
         "18.22 ± 0.03"], published=True),
    Row(["additive", "22.23 ± 0.11", "22.33 ± 0.04", "22.47 ± 0.27", "22.10 ± 0.18"],
        published=True),
    Row(["none: state, at one depth", "9.98 ± 0.28", "", "", ""], published=True),
    Row(["none: input, at one depth", "11.57 ± 0.30", "", "", ""], published=True),
)  # fmt: skip

# BLEU of the same systems, all sentences and those without unknown words.
BAHDANAU_ROWS = (
    Row(["encoder-decoder (no attention), trained to 30 words", "13.93", "24.19"], published=True),
    Row(["search (additive), trained to 30 words", "21.50", "31.44"], published=True),
    Row(["encoder-decoder (no attention), trained to 50 words", "17.82", "26.71"], published=True),
    Row(["search (additive), trained to 50 words", "26.75", "34.16"], published=True),
)

# Perplexity, BLEU, BLEU after replacing unknown words.
LUONG_ROWS = (
    Row(["global, location", "6.4", "18.1", "19.3"], published=True),
    Row(["global, dot", "6.1", "18.6", "20.5"], published=True),
    Row(["global, general", "6.1", "17.3", "19.1"], published=True),
    Row(["local-m, general", "6.2", "18.6", "20.4"], published=True),
    Row(["local-p, dot", "6.6", "18.0", "19.6"], published=True),
    Row(["local-p, general", "5.9", "19", "20.9"], published=True),
)
LUONG_ALIGNMENT_ERROR = "0.34–0.39"

# Depth: sd of q·k; then entropy / ln n, largest weight, Jacobian norm for the three scores.
# q, k ~ N(0, 1), 32 keys, 400 queries; None where no figure is given.
UNTRAINED = {
    4: (2.01, (0.662, 0.335, 0.301), (0.877, 0.155, None), (0.986, 0.055, None)),
    64: (8.03, (0.145, 0.813, 0.164), (0.868, 0.166, None), (0.958, 0.086, None)),
    256: (16.3, (0.067, 0.907, 0.012), (0.865, 0.170, None), (0.964, 0.081, None)),
    1024: (32.1, (0.024, 0.969, 0.0000), (0.868, 0.170, None), (0.960, 0.085, None)),
}

# Memory overhead at n = 2^8, 2^10, 2^12, 2^14, 2^16, and the change of speed.
RABE_STAATS_LENGTHS = (2**8, 2**10, 2**12, 2**14, 2**16)
RABE_STAATS_ROWS = (
    Row(["standard attention", "532 KB", "8 MB", "128 MB", "2 GB", "out of memory"],
        published=True),
    Row(["memory-efficient attention", "532 KB", "8 MB", "41 MB", "64 MB", "257 MB"],
        published=True),
    Row(["its speed against standard", "±5 %", "±5 %", "−30 %", "−35 %", "–"], published=True),
)  # fmt: skip
