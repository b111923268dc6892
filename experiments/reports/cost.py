"""The report of the cost study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import figures
from experiments.report.blocks import (
    COMPARE_THE_SHAPE,
    Picture,
    Report,
    Row,
    Section,
    Table,
    joined,
    mean_sd,
    memory,
)
from experiments.report.published import RABE_STAATS, RABE_STAATS_LENGTHS, RABE_STAATS_ROWS

_PASSES = {"forward": "Forward", "gradient": "Forward and backward"}


def build(results: Mapping[str, Any], folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    pictures = _draw(results, folder)
    faults = [f"{n}: {f}" for n, f in results["checks"].items() if not f.startswith("agrees")]
    return Report(
        title="What additive and dot-product attention cost",
        question=results["question"],
        answer=_answer(results),
        warnings=[f"A form was wrong and is not measured. {fault}." for fault in faults],
        sections=[
            Section(
                "Time",
                [
                    "Medians of interleaved rounds, without compiling, then mean and standard "
                    "deviation over the seeds (fresh inputs each). A form that would need more "
                    f"than {results['settings']['run_limit']} MiB of temporaries is not run.",
                ],
                [pictures["time"], *(_times(results, p) for p in _PASSES)],
            ),
            Section(
                "Memory",
                [
                    "Temporaries of the compiled function, as XLA's memory analysis gives them "
                    "without running it: what is needed beside inputs and results."
                ],
                [pictures["memory"], *(_memory(results, p) for p in _PASSES), _rabe_staats()],
            ),
            Section("Where each stops paying", _claims(results), [_crossovers(results)]),
        ],
    )


def ratio(results: Mapping[str, Any], which: str, first: str, second: str) -> dict[int, float]:
    """Return how many times as long ``first`` takes as ``second``, by length."""
    table = results["mean_milliseconds"][which]
    if first not in table or second not in table:
        return {}
    triples = zip(results["lengths"], table[first], table[second], strict=True)
    return {n: a / b for n, a, b in triples if a is not None and b}


def _answer(results: Mapping[str, Any]) -> list[str]:
    said = []
    for family in ("textbook", "our"):
        ratios = ratio(results, "forward", f"{family} additive", f"{family} dot")
        both = ratio(results, "gradient", f"{family} additive", f"{family} dot")
        if ratios and both:
            words = "As the textbook writes them" if family == "textbook" else "In this library"
            said.append(
                f"{words}, additive attention takes {_range(ratios.values())} times as long as the "
                f"dot product forward and {_range(both.values())} times with the gradient, over "
                f"lengths {min(ratios)} to {max(ratios)}."
            )
    gains = {
        kind: ratio(results, "gradient", f"textbook {kind}", f"our {kind}")
        for kind in ("additive", "dot")
    }
    for kind, gain in gains.items():
        if gain:
            longest = max(gain)
            said.append(
                f"At length {longest}, our {kind} attention with its gradient is "
                f"{_times_as(gain[longest])} the textbook's."
            )
    said += _paying(results)
    shrunk = _shrunk(results)
    if shrunk:
        said.append(shrunk)
    return said or ["Nothing was measured: see the warnings above."]


def _paying(results: Mapping[str, Any]) -> list[str]:
    """Return from which length on each textbook form loses to ours."""
    said = []
    for kind in ("additive", "dot"):
        pair = f"textbook {kind}", f"our {kind}"
        found = {c["pass"]: c["from"] for c in results["crossovers"] if _pair(c) == pair}
        if found:
            words = [
                f"{_PASSES[which].lower()} "
                + (
                    f"from length {at:,} on"
                    if at
                    else f"at no length up to {max(results['lengths']):,}"
                )
                for which, at in found.items()
            ]
            said.append(f"The textbook's {kind} form stops paying against ours {joined(words)}.")
    return said


def _pair(crossing: Mapping[str, Any]) -> tuple[str, str]:
    return crossing["slower"], crossing["faster"]


def _shrunk(results: Mapping[str, Any]) -> str | None:
    sizes = results["temporaries"]
    longest = max(sizes, key=int)
    row = sizes[longest]["gradient"]
    parts = [
        f"{memory(row[f'textbook {kind}'])} for the textbook's {kind} form and "
        f"{memory(row[f'our {kind}'])} for ours"
        for kind in ("dot", "additive")
        if row.get(f"textbook {kind}") and row.get(f"our {kind}")
    ]
    if not parts:
        return None
    return f"The gradient at length {int(longest):,} needs temporaries of {'; '.join(parts)}."


def _claims(results: Mapping[str, Any]) -> list[str]:
    """Return the articles' claims, each with what was measured here."""
    said = ["The articles claim: the dot product is 2–3 times faster than additive attention."]
    for family in ("textbook", "our"):
        for which, words in _PASSES.items():
            ratios = ratio(results, which, f"{family} additive", f"{family} dot")
            if ratios:
                listed = joined([f"{r:.1f} at {n}" for n, r in ratios.items()])
                said.append(f"{words}, {family} forms, measured here: {listed}.")
    said.append("They also claim: use additive attention up to length 512, the dot product beyond.")
    for family in ("textbook", "our"):
        ratios = ratio(results, "gradient", f"{family} additive", f"{family} dot")
        within = [n for n, r in ratios.items() if r <= 3]
        if not ratios:
            continue
        if not within:
            said.append(
                f"On this machine the {family} additive form costs more than three dot products at "
                "every length measured, so no length speaks for it by time alone; its quality must."
            )
        else:
            beyond = [n for n, r in ratios.items() if r > 3 and n > max(within)]
            said.append(
                f"On this machine the {family} additive form costs at most three dot products "
                f"(gradient included) at lengths {joined([str(n) for n in within])}"
                + (f" and more from {min(beyond)} on." if beyond else ".")
            )
    return said


def _times(results: Mapping[str, Any], which: str) -> Table:
    rows = [
        Row([name, *(mean_sd(values, 2) for values in row)])
        for name, row in results["milliseconds"][which].items()
    ]
    return Table(
        f"{_PASSES[which]}: milliseconds, by length",
        ["form", *(f"{n:,}" for n in results["lengths"])],
        rows,
        note="– : not run, its temporaries exceed the limit.",
    )


def _memory(results: Mapping[str, Any], which: str) -> Table:
    sizes = results["temporaries"]
    lengths = sorted(sizes, key=int)
    names = list(sizes[lengths[0]][which])
    return Table(
        f"{_PASSES[which]}: temporaries, by length",
        ["form", *(f"{int(n):,}" for n in lengths)],
        [Row([name, *(memory(sizes[n][which].get(name)) for n in lengths)]) for name in names],
    )


def _rabe_staats() -> Table:
    return Table(
        f"Published: memory overhead of dot-product attention ({RABE_STAATS}): {COMPARE_THE_SHAPE}",
        ["form", *(f"{n:,}" for n in RABE_STAATS_LENGTHS)],
        RABE_STAATS_ROWS,
        note="They report 59 times less overhead in inference and 32 times in differentiation at "
        "length 16,384.",
    )


def _crossovers(results: Mapping[str, Any]) -> Table:
    rows = [
        Row(
            [
                f"{c['slower']} is slower than {c['faster']}",
                _PASSES[c["pass"]].lower(),
                "not up to " + f"{max(results['lengths']):,}" if c["from"] is None
                else f"from {c['from']:,} on",
            ]
        )
        for c in results["crossovers"]
    ]  # fmt: skip
    return Table(
        "Crossovers on this machine, among the lengths measured",
        ["pair", "pass", "length"],
        rows,
        note="The least length from which the first stays slower at all longer ones measured.",
    )


def _draw(results: Mapping[str, Any], folder: Path) -> dict[str, Picture]:
    (folder / "figures").mkdir(exist_ok=True)
    lengths = results["lengths"]
    panels = []
    for which, words in _PASSES.items():
        rows = results["milliseconds"][which].items()
        series = {name: _runs(lengths, row) for name, row in rows}
        panels.append((words, series))
    figures.curves(
        folder / "figures/time.png", panels, x="length (T = S)", y="milliseconds", log_x=True,
        log_y=True, markers=True, missing="not run",
    )  # fmt: skip
    sizes = results["temporaries"]
    panels = []
    for which, words in _PASSES.items():
        names = sizes[min(sizes, key=int)][which]
        series = {
            name: [
                [(int(n), _mebibytes(sizes[n][which].get(name))) for n in sorted(sizes, key=int)]
            ]
            for name in names
        }
        panels.append((words, series))
    figures.curves(
        folder / "figures/memory.png", panels, x="length (T = S)", y="temporaries, MiB", log_x=True,
        log_y=True, markers=True, missing="not measured",
    )  # fmt: skip
    return {
        "time": Picture(
            "figures/time.png",
            "Time against length, forward and with gradient; the numbers are in the tables below.",
            "Time against length, both axes logarithmic. A line of slope 2 grows with the square.",
        ),
        "memory": Picture(
            "figures/memory.png",
            "Temporaries against length, forward and with gradient; the numbers are in the tables "
            "below.",
            "Temporaries against length, both axes logarithmic.",
        ),
    }


def _runs(lengths: Sequence[int], row: Sequence[Sequence[float | None]]) -> list[Any]:
    """Return one line a seed from the values by length and seed."""
    seeds = max((len(values) for values in row), default=0)
    return [
        [
            (n, values[i] if i < len(values) else None)
            for n, values in zip(lengths, row, strict=True)
        ]
        for i in range(seeds)
    ]


def _mebibytes(size: int | None) -> float | None:
    return size / 2**20 if size else None


def _range(values: Sequence[float] | Any) -> str:
    values = list(values)
    low, high = min(values), max(values)
    return f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"


def _times_as(gain: float) -> str:
    return f"{gain:.1f} times as fast as" if gain >= 1 else f"{1 / gain:.1f} times as slow as"
