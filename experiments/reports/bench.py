"""The report of the bench."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import figures
from experiments.report.blocks import Picture, Report, Row, Section, Table, memory

_PASSES = {"forward": "forward", "gradient": "forward and backward"}


def build(results: Mapping[str, Any], folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    red = {kernel: fault for kernel, fault in results["conformance"].items() if fault}
    picture = [_draw(results, folder)] if _timed(results) else []
    return Report(
        title="How fast the library's attention is",
        question=results["question"],
        answer=_answer(results),
        warnings=[
            f"{kernel} does not conform, so nothing is timed. {red[kernel]}" for kernel in red
        ],
        sections=[
            Section("Ratios", [_HOW], [*picture, *(_ratios(case) for case in results["cases"])]),
            Section(
                "Times, temporaries and compiling",
                ["Medians of the rounds, with the fastest and the slowest round."],
                [_details(case) for case in results["cases"]],
            ),
        ],
    )


_HOW = (
    "Each ratio is of two medians from the same rounds, in which the contestants take turns: a "
    "slow spell of the machine hits all of them. Below 1, the first is faster or smaller. A target "
    "is what this library aims at."
)


def _answer(results: Mapping[str, Any]) -> list[str]:
    rows = [row for case in results["cases"] for row in case["rows"]]
    aimed = [row for row in rows if row["reached"] is not None]
    if not rows:
        return ["Nothing was measured: see the warnings above."]
    reached = sum(row["reached"] for row in aimed)
    said = [f"{reached} of {len(aimed)} targets are reached."]
    missed = [
        f"{case['name']} ({_PASSES[row['pass']]}): {_value(row)} instead of {_aim(row)}"
        for case in results["cases"]
        for row in case["rows"]
        if row["reached"] is False
    ]
    if missed:
        said.append(f"Not reached: {'; '.join(missed)}.")
    return said


def _ratios(case: Mapping[str, Any]) -> Table:
    rows = [
        Row(
            [
                f"{row['of']} / {row['to']}" if row["to"] else row["of"],
                row["quantity"],
                _PASSES[row["pass"]],
                _value(row),
                "–" if row["at_most"] is None else f"at most {_aim(row)}",
                {None: "–", True: "reached", False: "missed"}[row["reached"]],
            ]
        )
        for row in case["rows"]
    ]
    columns = ["compared", "what", "pass", "measured", "target", ""]
    return Table(f"{case['name']}: {case['title']}", columns, rows)


def _value(row: Mapping[str, Any]) -> str:
    return _shown(row, row["value"])


def _aim(row: Mapping[str, Any]) -> str:
    return _shown(row, row["at_most"])


def _shown(row: Mapping[str, Any], value: float) -> str:
    if row["to"]:
        return f"{value:.3f}" if value < 0.2 else f"{value:.2f}"
    return memory(value) if row["quantity"] == "temporaries" else f"{value:.1f} s"


def _details(case: Mapping[str, Any]) -> Table:
    rows = []
    for which, measured in case["passes"].items():
        for name in measured["temporaries"]:
            time = measured["milliseconds"].get(name)
            seconds = measured["compile_seconds"][name]
            rows.append(
                Row(
                    [
                        name,
                        _PASSES[which],
                        "–" if time is None else f"{time['median']:.1f}",
                        "–" if time is None else f"{time['low']:.1f} to {time['high']:.1f}",
                        memory(measured["temporaries"][name]),
                        "–" if seconds is None else f"{seconds:.1f}",
                    ]
                )
            )
    columns = ["contestant", "pass", "ms", "range", "temporaries", "compiling, s"]
    return Table(f"{case['name']}", columns, rows)


def _timed(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (f"{case['name']}: {row['of']} / {row['to']}", row)
        for case in results["cases"]
        for row in case["rows"]
        if row["to"] and row["quantity"] == "time"
    ]


def _draw(results: Mapping[str, Any], folder: Path) -> Picture:
    (folder / "figures").mkdir(exist_ok=True)
    by_name: dict[str, dict[str, tuple[float, float | None]]] = {}
    for name, row in _timed(results):
        by_name.setdefault(name, {})[_PASSES[row["pass"]]] = row["value"], row["at_most"]
    figures.ratios(folder / "figures/ratios.png", by_name)
    return Picture(
        "figures/ratios.png",
        "Time ratios of all cases with their targets; the numbers are in the tables below.",
        "Ratios of times, on a logarithmic axis; a tick across a bar is its target.",
    )
