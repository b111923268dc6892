"""The report of the study of long sequences."""

import statistics
from pathlib import Path

from experiments.families import PATTERNS
from experiments.report import blocks as report
from experiments.report.figures import Style
from experiments.report.published import arena

_PASSES = {"forward": "Forward", "gradient": "Forward and backward"}
_TASKS = {
    "recall": "associative recall",
    "max": "max retrieval",
    "listops": "ListOps",
    "copy": "copying",
    "reverse": "reversing",
    "sort": "sorting",
}
_LINEAR = 1.25  # up to this exponent a cost is called linear
_LEARNT = 0.6  # if the best accuracy is lower, the task is not learnt


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings, passes = results["settings"], list(results["milliseconds"])
    faults = [f"{n}: {f}" for n, f in results["checks"].items() if not f.startswith("agrees")]
    how = [
        f"Self-attention with {settings['heads']} head(s) of depth {settings['depth']}, batch 1, "
        f"reach {settings['reach']}; medians of {settings['rounds']} interleaved rounds, without "
        "compiling. Temporaries are what the compiled function needs beside inputs and results. "
        "Each was compared with NumPy in float64 first.",
        "Exponents are slopes of least squares in log-log over the lengths in the table: 1 is "
        "linear, 2 the square. Fixed costs at the short lengths make them smaller.",
    ]
    costs = [_costs(results, folder, which) for which in passes]
    sections = [
        report.Section("Cost against length", how, [*costs, _fits(results)]),
        report.Section("Does cost follow the pattern?", [_PAIRS], [_pairs(results)]),
    ]
    if results["models"]:
        blocks = [_quality_picture(results, folder), _quality(results), _arena(results)]
        sections.append(report.Section("What is still learnt", _learning(results), blocks))
    rows = ([cell.strip() for cell in line.split("|")] for line in _FAMILIES.strip().splitlines())
    sources = [row for row in rows if row[0] in results["checks"]]
    what = report.Table("What each is", ["", "a query attends to", "from"], sources, prose=True)
    details = [table for which in passes for table in _details(results, which)]
    return report.Report(
        title="Long sequences: what patterns and families cost, and what they lose",
        answer=_answer(results),
        warnings=[
            *(f"One was wrong and is not measured. {fault}." for fault in faults),
            *report.diverged(
                (f"{_TASKS[m['task']]} with {m['name']}, seed {m['seed']},", m["diverged_at"])
                for m in results["models"]
            ),
        ],
        sections=[*sections, report.Section("All times and temporaries", [], [*details, what])],
    )


# The visible keys of a query, and the paper.
_FAMILIES = """
full | every pair, in blocks | Vaswani et al. 2017, arXiv 1706.03762
window | reach / 2 keys on each side | Beltagy et al. 2020, arXiv 2004.05150, §3.1
block-diagonal | the query's own block of reach keys | –
dilated | a window with every second key | Beltagy et al. 2020, arXiv 2004.05150, §3.1
strided | √T neighbours and every √T-th key | Child et al. 2019, arXiv 1904.10509, §4.3
random | 4 random blocks | Zaheer et al. 2020, arXiv 2007.14062, §2
prefix | the first reach keys | Raffel et al. 2020, arXiv 1910.10683, §3.2.1
global | reach / 4 tokens, which attend to all | Beltagy et al. 2020, arXiv 2004.05150, §3.1
longformer | a window and reach / 4 global tokens | Beltagy et al. 2020, arXiv 2004.05150
bigbird | 3 blocks nearby, 2 global, 3 random | Zaheer et al. 2020, arXiv 2007.14062
axial | one axis of a square grid | Ho et al. 2019, arXiv 1912.12180
linear-elu | features elu + 1 | Katharopoulos et al. 2020, arXiv 2006.16236
linear-relu | features relu | Choromanski et al. 2020, arXiv 2009.14794, §4.2
linear-cosine | features relu, and a cosine of the distance | Qin et al. 2022, arXiv 2202.08791
linear-favor | 4 H positive random features | Choromanski et al. 2020, arXiv 2009.14794
low-rank | reach projected keys | Wang et al. 2020, arXiv 2006.04768
nystrom | reach / 4 landmarks, at least 8 | Xiong et al. 2021, arXiv 2102.03902
memory-compressed | means of 4 keys (trained: a convolution) | Liu et al. 2018, arXiv 1801.10198
lsh | the tokens of its own bucket | Kitaev et al. 2020, arXiv 2001.04451
routed | the 4 best blocks by their means | Lu et al. 2025, arXiv 2502.13189
"""
_PAIRS = (
    "A mask keeps a share of all pairs. A kernel that skips blocks cannot compute less than the "
    "blocks with visible pairs; ours picks larger blocks than 64 where those are faster, and then "
    "visits more. A comb such as the strided pattern touches every block: its cost is the square, "
    "however few pairs it keeps."
)


def _answer(results: report.Results) -> list[str]:
    fits = {n: f["time_exponent"] for n, f in results["fits"].items()}
    known = {n: e for n, e in fits.items() if e is not None}
    lengths, times = results["lengths"], next(iter(results["milliseconds"].values()))
    said = []
    if straight := report.joined(n for n, e in known.items() if e <= _LINEAR):
        said.append(
            f"From length {lengths[0]:,} to {lengths[-1]:,} the time of {straight} grows with an "
            f"exponent of at most {_LINEAR}."
        )
    if steeper := report.listed({n: e for n, e in known.items() if e > _LINEAR}, ".2f"):
        said.append(f"Steeper: {steeper}.")
    if "full" in times:
        full = times["full"][-1]
        ratios = {name: row[-1] / full for name, row in times.items() if name != "full"}
        if faster := report.listed({n: r for n, r in ratios.items() if r < 1}, ".2f", best=min):
            said.append(f"Time over full attention at {lengths[-1]:,}: {faster}.")
        if slower := report.listed({n: r for n, r in ratios.items() if r >= 1}, ".2f", best=min):
            said.append(f"No faster than full attention there: {slower}.")
    for task, rows in results["mean_accuracy"].items():
        words = (
            f"On {_TASKS[task]}, right after {results['settings']['steps']:,} steps: "
            f"{report.listed(rows, '.0f', best=max, percent=True)}"
        )
        if max(rows.values()) < _LEARNT:
            words += "; none has learnt it in so few, so the order means little"
        said.append(f"{words}.")
    return said or ["Nothing was measured: see the warnings above."]


def _fits(results: report.Results) -> report.Table:
    columns, fits = ["", "time", "temporaries"], [results["fits"]]
    if results["gradient_fits"] and "forward" in results["milliseconds"]:
        columns += ["time, with gradient", "temporaries, with gradient"]
        fits.append(results["gradient_fits"])
    rows = [[n, *(e for fit in fits for e in _exponents(fit[n]))] for n in results["fits"]]
    first, last = results["lengths"][0], results["lengths"][-1]
    return report.Table(f"Fitted exponents, lengths {first:,} to {last:,}", columns, rows)


def _exponents(fit: report.Results) -> list[str]:
    return [report.number(fit[name], ".2f") for name in ("time_exponent", "memory_exponent")]


def _pairs(results: report.Results) -> report.Table:
    times = next(iter(results["milliseconds"].values()))
    full = times.get("full")
    rows = []
    for name, by_length in results["pairs"].items():
        if (share := by_length[-1]) is not None:
            ratio = report.number(times[name][-1] / full[-1] if full else None, ".3f")
            kinds = (f"{share[kind]:.4f}" for kind in ("seen", "touched", "computed"))
            rows.append([name, *kinds, ratio])
    return report.Table(
        f"Shares of all pairs at length {results['lengths'][-1]:,}, and time over full attention",
        ["pattern", "kept by the mask", "in blocks of 64", "in the blocks visited", "time / full"],
        rows,
    )


def _learning(results: report.Results) -> list[str]:
    settings, some = results["settings"], results["models"][0]
    total = settings["places"]
    return [
        f"A Transformer of two layers, width 64, four heads ({some['parameters']:,} parameters "
        f"with {some['name']}) is trained with each for {settings['steps']:,} steps of "
        f"{settings['batch_size']} problems of length {total}, answers included; a query attends "
        f"to about {max(total // 4, 4)} of the positions. Right is the share of right answers on "
        "problems never trained on; the dotted line is chance.",
        "So short a training shows what is learnt easily with each, not what could be learnt. "
        "The full preset trains all of them longer, over three seeds.",
    ]


def _names(results: report.Results) -> list[str]:
    return list(dict.fromkeys(model["name"] for model in results["models"]))


def _quality(results: report.Results) -> report.Table:
    accuracy, count = results["accuracy"], results["settings"]["seeds"]
    rows = [
        [name, *(report.mean_sd(accuracy[t].get(name, []), percent=True) for t in accuracy)]
        for name in _names(results)
    ]
    rows.append(["chance", *(f"{100 * results['chance'][t]:.1f} %" for t in accuracy)])
    title = f"Right answers, {count} seed{'s' if count > 1 else ''}"
    return report.Table(title, ["", *(_TASKS[t] for t in accuracy)], rows)


def _arena(results: report.Results) -> report.Table:
    rows = results["mean_accuracy"].values()
    return arena(
        {
            name: f"{100 * statistics.fmean(row[name] for row in rows):.1f} %"
            for name in _names(results)
            if all(name in row for row in rows)
        }
    )


def _details(results: report.Results, which: str) -> list[report.Table]:
    columns = ["", *(f"{n:,}" for n in results["lengths"])]
    times, sizes = results["milliseconds"][which], results["temporaries"][which]
    return [
        report.Table(
            f"{_PASSES[which]}: milliseconds, by length",
            columns,
            [[name, *(f"{v:.2f}" for v in row)] for name, row in times.items()],
        ),
        report.Table(
            f"{_PASSES[which]}: temporaries, by length",
            columns,
            [[name, *(report.memory(v) for v in row)] for name, row in sizes.items()],
        ),
    ]


def _styles(names: list[str]) -> dict[str, Style]:
    """Return the style of each: full in black, patterns in blues, other families dashed."""
    blues, warm = ("#0072b2", "#56b4e9", "#3b6ea5"), ("#d55e00", "#e69f00", "#cc79a7", "#a3153f")
    kinds = [[n for n in names if n in PATTERNS], [n for n in names if n not in PATTERNS]]
    found: dict[str, Style] = {}
    for own, shades, dashes in zip(kinds, (blues, warm), ("-", "--"), strict=True):
        for at, name in enumerate(own):
            found[name] = shades[at % len(shades)], dashes, "osD^vP*Xh<>"[at % 11]
    return found | ({"full": ("#111827", "-", "o")} if "full" in names else {})


def _costs(results: report.Results, folder: Path, which: str) -> report.Picture:
    fits = results["fits"] if which == "forward" else results["gradient_fits"]
    sizes, lengths = results["temporaries"][which], results["lengths"]

    def lines(table: report.Results) -> dict[str, list[list[tuple[float, float | None]]]]:
        return {n: [list(zip(lengths, row, strict=True))] for n, row in table.items()}

    mebibytes = {n: [v / 2**20 if v else None for v in row] for n, row in sizes.items()}
    return report.picture(
        folder, which, "curves",
        [("Time", lines(results["milliseconds"][which])), ("Temporaries", lines(mebibytes))],
        x="length (T = S)", y=("milliseconds", "MiB"), log_x=True, log_y=True, markers=True,
        missing="not measured", slopes=True, styles=_styles(list(fits)),
        labels={n: f"{n}   {'  '.join(_exponents(fit))}" for n, fit in fits.items()},
        alt="Time and temporaries of each against length; the numbers are in the tables.",
        caption=f"{_PASSES[which]}: time and temporaries against length, both logarithmic, with "
        "their exponents. Blue lines are patterns, dashed warm ones other families; dotted grey "
        "lines have slopes 1 and 2.",
    )  # fmt: skip


def _quality_picture(results: report.Results, folder: Path) -> report.Picture:
    names = _names(results)
    styles = _styles(names)
    panels = [(_TASKS[t], results["chance"][t], rows) for t, rows in results["accuracy"].items()]
    return report.picture(
        folder, "quality", "dots", panels, {name: styles[name] for name in names},
        alt="Share of right answers of each on each task; the numbers are in the table below.",
        caption="Share of right answers, mean and range over the seeds.",
    )  # fmt: skip
