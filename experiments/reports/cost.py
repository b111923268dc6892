"""The report of the cost study."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.report.blocks import (
    Picture,
    Report,
    Results,
    Section,
    Table,
    joined,
    mean_sd,
    memory,
)
from experiments.report.figures import curves, picture
from experiments.report.published import rabe_staats

_PASSES = {"forward": "Forward", "gradient": "Forward and backward"}
_FAMILIES = {"textbook": "As the textbook writes them", "our": "In this library"}


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    faults = [f"{n}: {f}" for n, f in results["checks"].items() if not f.startswith("agrees")]
    lengths = results["lengths"]
    times = [
        Table(
            f"{words}: milliseconds, by length",
            ["form", *(f"{n:,}" for n in lengths)],
            [
                [name, *(mean_sd(values, 2) for values in row)]
                for name, row in results["milliseconds"][which].items()
            ],
            note="– : not run, its temporaries exceed the limit.",
        )
        for which, words in _PASSES.items()
    ]
    sizes = {int(n): cell for n, cell in results["temporaries"].items()}
    temporaries = [
        Table(
            f"{words}: temporaries, by length",
            ["form", *(f"{n:,}" for n in sorted(sizes))],
            [
                [name, *(memory(sizes[n][which].get(name)) for n in sorted(sizes))]
                for name in sizes[min(sizes)][which]
            ],
        )
        for which, words in _PASSES.items()
    ]
    crossovers = Table(
        "Crossovers on this machine, among the lengths measured",
        ["pair", "pass", "length"],
        [
            [
                f"{c['slower']} is slower than {c['faster']}",
                _PASSES[c["pass"]].lower(),
                f"from {c['from']:,} on" if c["from"] else f"not up to {max(lengths):,}",
            ]
            for c in results["crossovers"]
        ],
        note="The least length from which the first stays slower at all longer ones measured.",
    )
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
                [_times_picture(results, folder), *times],
            ),
            Section(
                "Memory",
                [
                    "Temporaries of the compiled function, as XLA's memory analysis gives them "
                    "without running it: what is needed beside inputs and results."
                ],
                [_memory_picture(results, folder), *temporaries, rabe_staats()],
            ),
            Section("Where each stops paying", _claims(results), [crossovers]),
        ],
    )


def ratio(results: Results, which: str, first: str, second: str) -> dict[int, float]:
    """Return how many times as long ``first`` takes as ``second``, by length."""
    table = results["mean_milliseconds"][which]
    if first not in table or second not in table:
        return {}
    triples = zip(results["lengths"], table[first], table[second], strict=True)
    return {n: a / b for n, a, b in triples if a is not None and b}


def _answer(results: Results) -> list[str]:
    said = []
    for family, words in _FAMILIES.items():
        both = [ratio(results, p, f"{family} additive", f"{family} dot") for p in _PASSES]
        if all(both):
            forward, gradient = (_range(ratios.values()) for ratios in both)
            said.append(
                f"{words}, additive attention takes {forward} times as long as the dot product "
                f"forward and {gradient} times with the gradient, over lengths {min(both[0])} to "
                f"{max(both[0])}."
            )
    for kind in ("additive", "dot"):
        gains = ratio(results, "gradient", f"textbook {kind}", f"our {kind}")
        if gains:
            gain = gains[max(gains)]
            fast = f"{gain:.1f} times as fast as", f"{1 / gain:.1f} times as slow as"
            said.append(
                f"At length {max(gains)}, our {kind} attention with its gradient is "
                f"{fast[gain < 1]} the textbook's."
            )
    for kind in ("additive", "dot"):
        pair = f"textbook {kind}", f"our {kind}"
        found = {
            _PASSES[c["pass"]].lower(): c["from"]
            for c in results["crossovers"]
            if (c["slower"], c["faster"]) == pair
        }
        if found:
            longest = max(results["lengths"])
            words = joined(
                f"{which} from length {at:,} on"
                if at
                else f"{which} at no length up to {longest:,}"
                for which, at in found.items()
            )
            said.append(f"The textbook's {kind} form stops paying against ours {words}.")
    return [*said, *_shrunk(results)] or ["Nothing was measured: see the warnings above."]


def _shrunk(results: Results) -> list[str]:
    longest = max(results["temporaries"], key=int)
    row = results["temporaries"][longest]["gradient"]
    parts = [
        f"{memory(row[f'textbook {kind}'])} for the textbook's {kind} form and "
        f"{memory(row[f'our {kind}'])} for ours"
        for kind in ("dot", "additive")
        if row.get(f"textbook {kind}") and row.get(f"our {kind}")
    ]
    said = f"The gradient at length {int(longest):,} needs temporaries of {'; '.join(parts)}."
    return [said] if parts else []


def _claims(results: Results) -> list[str]:
    """Return the articles' claims, each with what was measured here."""
    said = ["The articles claim: the dot product is 2–3 times faster than additive attention."]
    for family in _FAMILIES:
        for which, words in _PASSES.items():
            ratios = ratio(results, which, f"{family} additive", f"{family} dot")
            if ratios:
                shown = joined(f"{r:.1f} at {n}" for n, r in ratios.items())
                said.append(f"{words}, {family} forms, measured here: {shown}.")
    said.append("They also claim: use additive attention up to length 512, the dot product beyond.")
    for family in _FAMILIES:
        ratios = ratio(results, "gradient", f"{family} additive", f"{family} dot")
        within = [n for n, r in ratios.items() if r <= 3]
        beyond = [n for n, r in ratios.items() if within and r > 3 and n > max(within)]
        if ratios and not within:
            said.append(
                f"On this machine the {family} additive form costs more than three dot products at "
                "every length measured, so no length speaks for it by time alone; its quality must."
            )
        elif ratios:
            said.append(
                f"On this machine the {family} additive form costs at most three dot products "
                f"(gradient included) at lengths {joined(map(str, within))}"
                + (f" and more from {min(beyond)} on." if beyond else ".")
            )
    return said


def _times_picture(results: Results, folder: Path) -> Picture:
    def lines(row: Sequence[Sequence[float | None]]) -> list[Any]:
        """Return one line a seed from the values by length and seed."""
        points = list(zip(results["lengths"], row, strict=True))
        most = max(map(len, row), default=0)
        return [[(n, v[i] if i < len(v) else None) for n, v in points] for i in range(most)]

    panels = [
        (words, {name: lines(row) for name, row in results["milliseconds"][which].items()})
        for which, words in _PASSES.items()
    ]
    return picture(
        folder, "time", curves, panels, x="length (T = S)", y="milliseconds", log_x=True,
        log_y=True, markers=True, missing="not run",
        alt="Time against length, forward and with gradient; the numbers are in the tables below.",
        caption="Time against length, both axes logarithmic. A line of slope 2 grows with the "
        "square.",
    )  # fmt: skip


def _memory_picture(results: Results, folder: Path) -> Picture:
    sizes = {int(n): cell for n, cell in results["temporaries"].items()}
    panels = []
    for which, words in _PASSES.items():
        series = {
            name: [[(n, (sizes[n][which].get(name) or 0) / 2**20) for n in sorted(sizes)]]
            for name in sizes[min(sizes)][which]
        }
        panels.append((words, series))
    return picture(
        folder, "memory", curves, panels, x="length (T = S)", y="temporaries, MiB", log_x=True,
        log_y=True, markers=True, missing="not measured",
        alt="Temporaries against length, forward and with gradient; the numbers are in the tables "
        "below.",
        caption="Temporaries against length, both axes logarithmic.",
    )  # fmt: skip


def _range(values: Iterable[float]) -> str:
    ends = f"{min(values := list(values)):.1f}", f"{max(values):.1f}"
    return " to ".join(dict.fromkeys(ends))
