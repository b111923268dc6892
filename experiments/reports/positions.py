"""The report of the study of positions."""

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
    diverged,
    joined,
    mean_sd,
)

Results = Mapping[str, Any]
_TASKS = {"max": "max retrieval", "copy": "copying", "reverse": "reversing", "sort": "sorting"}
WORDS = {
    "none": "no positions",
    "log-n": "none, log-n logits",
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "rotary": "rotary",
    "rotary-linear": "rotary, linear",
    "rotary-ntk": "rotary, NTK",
    "rotary-yarn": "rotary, YaRN",
    "alibi": "ALiBi",
    "t5": "T5 buckets",
    "shaw": "Shaw",
    "transformer-xl": "Transformer-XL",
}
# A model that is right this often at the trained length has learnt something to carry over.
_LEARNT = 0.6


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]
    how = (
        f"A causal Transformer of two layers, width 64 and four heads is trained for "
        f"{settings['steps']:,} steps of {settings['batch_size']} lists of 1 to "
        f"{results['trained_length']} symbols, and tested on new lists of that length and longer "
        "ones. Right is the share of answered symbols that are right, each given the right ones "
        "before it. The rotary variants are one trained model, tested with a scaling."
    )
    return Report(
        title="Train short, test long: positions",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged(
            (f"{_TASKS[m['task']]} with {WORDS[m['scheme']]}, seed {m['seed']},", m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            Section(
                "Accuracy against length",
                [how],
                [_draw(results, folder), *(_table(results, task) for task in results["accuracy"])],
            ),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )


def learnt(results: Results, task: str) -> list[str]:
    """Return the schemes that had learnt the task at the trained length."""
    rows = results["mean_accuracy"][task]
    return [scheme for scheme, row in rows.items() if row[0] >= _LEARNT]


def kept(results: Results, task: str) -> dict[str, float]:
    """Return the mean accuracy past the trained length of the schemes that learnt, best first."""
    rows = results["mean_accuracy"][task]
    means = {s: sum(rows[s][1:]) / max(len(rows[s]) - 1, 1) for s in learnt(results, task)}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _answer(results: Results) -> list[str]:
    said = []
    ratios = results["ratios"]
    for task, rows in results["mean_accuracy"].items():
        good = learnt(results, task)
        if not good:
            said.append(
                f"No scheme has learnt {_TASKS[task]} in {results['settings']['steps']:,} steps "
                f"(right at least {100 * _LEARNT:.0f} % at the trained length), so nothing can be "
                "said of longer lists."
            )
            continue
        if len(ratios) > 1:
            means = kept(results, task)
            listed = joined([f"{WORDS[s]} {100 * mean:.0f} %" for s, mean in means.items()])
            said.append(
                f"{_TASKS[task].capitalize()}, right on average over {ratios[1]} to {ratios[-1]} "
                f"times the trained length: {listed}."
            )
        poor = [f"{WORDS[s]} ({100 * row[0]:.0f} %)" for s, row in rows.items() if s not in good]
        if poor:
            said.append(
                f"{_TASKS[task].capitalize()} is not learnt in so few steps with {joined(poor)}."
            )
    return said


def _table(results: Results, task: str) -> Table:
    rows = [
        Row([WORDS[scheme], *(mean_sd(values, percent=True) for values in row)])
        for scheme, row in results["accuracy"][task].items()
    ]
    length = results["trained_length"]
    return Table(
        f"{_TASKS[task].capitalize()}: right answers, by length "
        f"(chance {100 * results['chance'][task]:.0f} %)",
        ["scheme", *(f"{r} × {length}" for r in results["ratios"])],
        rows,
    )


def _claims(results: Results) -> Table:
    rows = [
        Row([paper, claim, _ours(results, schemes)], published=True)
        for paper, claim, schemes in _PAPERS
    ]
    return Table(f"Published: {COMPARE_THE_SHAPE}", ["paper", "claim", "ours"], rows, prose=True)


def _ours(results: Results, schemes: Sequence[str]) -> str:
    """Return what was measured of these schemes at the longest test, in words."""
    ratio = results["ratios"][-1]
    parts = []
    for task, rows in results["mean_accuracy"].items():
        found = [f"{WORDS[s]} {100 * rows[s][-1]:.0f} %" for s in schemes if s in rows]
        if found:
            parts.append(f"{_TASKS[task]} at {ratio} times the length: {joined(found)}")
    return "; ".join(parts) or "–"


_PAPERS = (
    (
        "Press et al. 2021, arXiv 2108.12409",
        "ALiBi trained at 1,024 and tested at 2,048 equals sinusoidal trained at 2,048.",
        ("alibi", "sinusoidal"),
    ),
    (
        "Raffel et al. 2020, arXiv 1910.10683",
        "32 buckets, log-spaced to distance 128; all farther ones share the last.",
        ("t5",),
    ),
    (
        "Su et al. 2021, arXiv 2104.09864",
        "Rotary positions: 27.5 BLEU on WMT14 en-de against 27.3 with sinusoidal.",
        ("rotary", "sinusoidal"),
    ),
    (
        "Kazemnejad et al. 2023, arXiv 2305.19466",
        "Decoder-only models generalise best to longer inputs with no position encoding.",
        ("none", "alibi", "t5", "rotary"),
    ),
    (
        "Nakanishi 2025, arXiv 2501.19399; Chiang and Cholak 2022, arXiv 2202.12172",
        "Logits times log n keep the weights sharp on longer inputs.",
        ("log-n", "none"),
    ),
)


def _draw(results: Results, folder: Path) -> Picture:
    (folder / "figures").mkdir(exist_ok=True)
    ratios = results["ratios"]
    panels = []
    for task, rows in results["accuracy"].items():
        series = {
            WORDS[scheme]: [
                [(r, 100 * values[seed]) for r, values in zip(ratios, row, strict=True)]
                for seed in range(len(row[0]))
            ]
            for scheme, row in rows.items()
        }
        panels.append((_TASKS[task], series))
    figures.curves(
        folder / "figures/accuracy.png", panels, x="test length / trained length", y="right, %",
        log_x=True, markers=True, low_y=0, mark_y=(10.0, "chance"),
    )  # fmt: skip
    return Picture(
        "figures/accuracy.png",
        "Right answers with each scheme against test length; the numbers are in the tables below.",
        "Right answers against test length over trained length, mean and range over the seeds.",
    )
