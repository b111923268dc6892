"""The report of the bench."""

from pathlib import Path

from experiments.report.blocks import Report, Results, Section, Table, memory, number
from experiments.report.figures import picture, ratios

_PASSES = {"forward": "forward", "gradient": "forward and backward"}


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    faults = {kernel: fault for kernel, fault in results["conformance"].items() if fault}
    timed: dict[str, dict[str, tuple[float, float | None]]] = {}
    for case in results["cases"]:
        for row in case["rows"]:
            if row["to"] and row["quantity"] == "time":
                name = f"{case['name']}: {row['of']} / {row['to']}"
                timed.setdefault(name, {})[_PASSES[row["pass"]]] = row["value"], row["at_most"]
    drawn = [
        picture(
            folder, "ratios", ratios, timed,
            alt="Time ratios of all cases with their targets; the numbers are in the tables below.",
            caption="Ratios of times, on a logarithmic axis; a tick across a bar is its target.",
        )
    ] if timed else []  # fmt: skip
    return Report(
        title="How fast the library's attention is",
        question=results["question"],
        answer=_answer(results),
        warnings=[
            f"{kernel} does not conform, so nothing is timed. {fault}"
            for kernel, fault in faults.items()
        ],
        sections=[
            Section("Ratios", [_HOW], [*drawn, *map(_ratios, results["cases"])]),
            Section(
                "Times, temporaries and compiling",
                ["Medians of the rounds, with the fastest and the slowest round."],
                [_details(case) for case in results["cases"]],
            ),
        ],
    )


_HOW = (
    "Each ratio is of two medians from the same rounds, in which the contestants take turns: a "
    "slow spell of the machine affects all of them. Below 1, the first is faster or smaller. A "
    "target is the ratio that this library aims at."
)


def _answer(results: Results) -> list[str]:
    rows = [(case["name"], row) for case in results["cases"] for row in case["rows"]]
    aimed = [(name, row) for name, row in rows if row["reached"] is not None]
    if not rows:
        return ["Nothing was measured: see the warnings above."]
    said = [f"{sum(row['reached'] for _, row in aimed)} of {len(aimed)} targets are reached."]
    missed = [
        f"{name} ({_PASSES[row['pass']]}): {_shown(row, 'value')} instead of "
        f"{_shown(row, 'at_most')}"
        for name, row in aimed
        if not row["reached"]
    ]
    return [*said, f"Not reached: {'; '.join(missed)}."] if missed else said


def _ratios(case: Results) -> Table:
    rows = [
        [
            f"{row['of']} / {row['to']}" if row["to"] else row["of"],
            row["quantity"],
            _PASSES[row["pass"]],
            _shown(row, "value"),
            "–" if row["at_most"] is None else f"at most {_shown(row, 'at_most')}",
            {None: "–", True: "reached", False: "missed"}[row["reached"]],
        ]
        for row in case["rows"]
    ]
    columns = ["compared", "what", "pass", "measured", "target", ""]
    return Table(f"{case['name']}: {case['title']}", columns, rows)


def _shown(row: Results, key: str) -> str:
    value = row[key]
    if row["to"]:
        return f"{value:.3f}" if value < 0.2 else f"{value:.2f}"
    return memory(value) if row["quantity"] == "temporaries" else f"{value:.1f} s"


def _details(case: Results) -> Table:
    rows = []
    for which, measured in case["passes"].items():
        for name, size in measured["temporaries"].items():
            time = measured["milliseconds"].get(name) or {}
            low, high = (number(time.get(end), ".1f") for end in ("low", "high"))
            median = number(time.get("median"), ".1f")
            seconds = number(measured["compile_seconds"][name], ".1f")
            span = f"{low} to {high}" if time else "–"
            rows.append([name, _PASSES[which], median, span, memory(size), seconds])
    columns = ["contestant", "pass", "ms", "range", "temporaries", "compiling, s"]
    return Table(case["name"], columns, rows)
