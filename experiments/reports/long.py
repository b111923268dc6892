"""The report of the study of long sequences."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import long_figures
from experiments.families import PATTERNS
from experiments.report.blocks import (
    Picture,
    Report,
    Row,
    Section,
    Table,
    diverged,
    joined,
    mean_sd,
    memory,
)
from experiments.reports.long_published import SOURCES, arena

Results = Mapping[str, Any]
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
# Where the best is right less often, the task is not learnt.
_LEARNT = 0.6


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    faults = [f"{n}: {f}" for n, f in results["checks"].items() if not f.startswith("agrees")]
    costs = [_draw_costs(results, folder, which) for which in results["milliseconds"]]
    sections = [
        Section("Cost against length", _how(results), [*costs, _fits(results)]),
        Section("Does cost follow the pattern?", [_PAIRS], [_pairs(results)]),
    ]
    if results["models"]:
        sections.append(
            Section(
                "What is still learnt",
                _learning(results),
                [_draw_quality(results, folder), _quality(results), arena(_averages(results))],
            )
        )
    details = [t for which in results["milliseconds"] for t in _details(results, which)]
    sections.append(Section("All times and temporaries", [], [*details, _sources(results)]))
    return Report(
        title="Long sequences: what patterns and families cost, and what they lose",
        question=results["question"],
        answer=_answer(results),
        warnings=[
            *(f"One was wrong and is not measured. {fault}." for fault in faults),
            *diverged(
                (f"{_TASKS[m['task']]} with {m['name']}, seed {m['seed']},", m["diverged_at"])
                for m in results["models"]
            ),
        ],
        sections=sections,
    )


_PAIRS = (
    "A mask keeps a share of all pairs. A kernel that skips blocks cannot compute less than the "
    "blocks that have something to see; ours picks larger blocks than 64 where those are faster, "
    "and then visits more. A comb such as the strided pattern touches every block: its cost is the "
    "square, however few pairs it keeps."
)


def _how(results: Results) -> list[str]:
    settings = results["settings"]
    return [
        f"Self-attention with {settings['heads']} head(s) of depth {settings['depth']}, batch 1, "
        f"reach {settings['reach']}; medians of {settings['rounds']} interleaved rounds, without "
        "compiling. Temporaries are what the compiled function needs beside inputs and results. "
        "Each was compared with NumPy in float64 first.",
        "Exponents are slopes of least squares in log-log over the lengths in the table: 1 is "
        "linear, 2 the square. Fixed costs at the short lengths make them smaller.",
    ]


def _answer(results: Results) -> list[str]:
    fits = {n: f["time_exponent"] for n, f in results["fits"].items()}
    known = {n: e for n, e in fits.items() if e is not None}
    said = []
    lengths = results["lengths"]
    which = next(iter(results["milliseconds"]))
    times = results["milliseconds"][which]
    if known:
        straight = [n for n, e in known.items() if e <= _LINEAR]
        rest = [f"{n} {e:.2f}" for n, e in known.items() if e > _LINEAR]
        if straight:
            said.append(
                f"From length {lengths[0]:,} to {lengths[-1]:,} the time of {joined(straight)} "
                f"grows with an exponent of at most {_LINEAR}."
            )
        if rest:
            said.append(f"Steeper: {joined(rest)}.")
    if "full" in times:
        full = times["full"][-1]
        ratios = sorted((row[-1] / full, name) for name, row in times.items() if name != "full")
        faster = [f"{name} {ratio:.2f}" for ratio, name in ratios if ratio < 1]
        slower = [f"{name} {ratio:.2f}" for ratio, name in ratios if ratio >= 1]
        if faster:
            said.append(f"Time over full attention at {lengths[-1]:,}: {joined(faster)}.")
        if slower:
            said.append(f"No faster than full attention there: {joined(slower)}.")
    for task, rows in results["mean_accuracy"].items():
        said.append(_lesson(results, task, rows))
    return said or ["Nothing was measured: see the warnings above."]


def _lesson(results: Results, task: str, rows: Mapping[str, float]) -> str:
    listed = joined([f"{n} {100 * a:.0f} %" for n, a in sorted(rows.items(), key=lambda x: -x[1])])
    words = f"On {_TASKS[task]}, right after {results['settings']['steps']:,} steps: {listed}"
    if max(rows.values()) < _LEARNT:
        words += "; none has learnt it in so few, so the order means little"
    return f"{words}."


def _fits(results: Results) -> Table:
    columns = ["", "time", "temporaries"]
    both = bool(results["gradient_fits"]) and "forward" in results["milliseconds"]
    if both:
        columns += ["time, with gradient", "temporaries, with gradient"]
    rows = []
    for name, fit in results["fits"].items():
        cells = [name, *_exponents(fit)]
        if both:
            cells += _exponents(results["gradient_fits"][name])
        rows.append(Row(cells))
    first, last = results["lengths"][0], results["lengths"][-1]
    return Table(f"Fitted exponents, lengths {first:,} to {last:,}", columns, rows)


def _exponents(fit: Mapping[str, float | None]) -> list[str]:
    values = (fit["time_exponent"], fit["memory_exponent"])
    return ["–" if value is None else f"{value:.2f}" for value in values]


def _pairs(results: Results) -> Table:
    which = next(iter(results["milliseconds"]))
    times = results["milliseconds"][which]
    full = times.get("full")
    rows = []
    for name, by_length in results["pairs"].items():
        share = by_length[-1]
        if share is not None:
            ratio = times[name][-1] / full[-1] if full else None
            rows.append(
                Row(
                    [
                        name,
                        *(f"{share[kind]:.4f}" for kind in ("seen", "touched", "computed")),
                        "–" if ratio is None else f"{ratio:.3f}",
                    ]
                )
            )
    return Table(
        f"Shares of all pairs at length {results['lengths'][-1]:,}, and time over full attention",
        ["pattern", "kept by the mask", "in blocks of 64", "in the blocks visited", "time / full"],
        rows,
    )


def _learning(results: Results) -> list[str]:
    settings = results["settings"]
    places = settings["places"]
    some = results["models"][0]
    return [
        f"A Transformer of two layers, width 64, four heads ({some['parameters']:,} parameters "
        f"with {some['name']}) is trained with each for {settings['steps']:,} steps of "
        f"{settings['batch_size']} problems of {places} places; a query looks at about "
        f"{max(places // 4, 4)} of them. Right is the share of right answers on problems never "
        "trained on; the dotted line is chance.",
        "So short a training shows what is learnt easily with each, not what could be learnt. "
        "The full preset trains all of them longer, over three seeds.",
    ]


def _quality(results: Results) -> Table:
    accuracy = results["accuracy"]
    names = _names(results)
    rows = [
        Row([name, *(mean_sd(accuracy[t].get(name, []), percent=True) for t in accuracy)])
        for name in names
    ]
    rows.append(Row(["chance", *(f"{100 * results['chance'][t]:.1f} %" for t in accuracy)]))
    seeds = results["settings"]["seeds"]
    return Table(
        f"Right answers, {seeds} seed{'s' if seeds > 1 else ''}",
        ["", *(_TASKS[t] for t in accuracy)],
        rows,
    )


def _names(results: Results) -> list[str]:
    return list(dict.fromkeys(model["name"] for model in results["models"]))


def _averages(results: Results) -> dict[str, str]:
    rows = results["mean_accuracy"].values()
    return {
        name: f"{100 * statistics.fmean(row[name] for row in rows):.1f} %"
        for name in _names(results)
        if all(name in row for row in rows)
    }


def _details(results: Results, which: str) -> list[Table]:
    columns = ["", *(f"{n:,}" for n in results["lengths"])]
    times, sizes = results["milliseconds"][which], results["temporaries"][which]
    return [
        Table(
            f"{_PASSES[which]}: milliseconds, by length",
            columns,
            [Row([name, *(f"{v:.2f}" for v in row)]) for name, row in times.items()],
        ),
        Table(
            f"{_PASSES[which]}: temporaries, by length",
            columns,
            [Row([name, *(memory(v) for v in row)]) for name, row in sizes.items()],
        ),
    ]


def _sources(results: Results) -> Table:
    rows = [Row([name, *SOURCES[name]]) for name in results["checks"]]
    return Table("What each is", ["", "a query looks at", "from"], rows, prose=True)


def _draw_costs(results: Results, folder: Path, which: str) -> Picture:
    fits = results["fits"] if which == "forward" else results["gradient_fits"]
    words = {n: f"{n}   {'  '.join(_exponents(fits[n]))}" for n in fits}
    sizes = results["temporaries"][which]
    mebibytes = {n: [v / 2**20 if v else None for v in row] for n, row in sizes.items()}
    file = f"figures/{which}.png"
    long_figures.costs(
        folder / file,
        results["lengths"],
        [
            ("Time", "milliseconds", results["milliseconds"][which]),
            ("Temporaries", "MiB", mebibytes),
        ],
        words,
        list(PATTERNS),
    )
    return Picture(
        file,
        "Time and temporaries of each against length; the numbers are in the tables.",
        f"{_PASSES[which]}: time and temporaries against length, both logarithmic. Blue lines are "
        "patterns, dashed warm ones other families; dotted grey lines have slopes 1 and 2.",
    )


def _draw_quality(results: Results, folder: Path) -> Picture:
    names = _names(results)
    panels = [
        (_TASKS[task], results["chance"][task], rows) for task, rows in results["accuracy"].items()
    ]
    long_figures.dots(folder / "figures/quality.png", names, panels, list(PATTERNS))
    return Picture(
        "figures/quality.png",
        "Share of right answers of each on each task; the numbers are in the table below.",
        "Share of right answers, mean and range over the seeds.",
    )
