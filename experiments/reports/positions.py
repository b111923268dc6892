"""The report of the study of positions."""

from collections.abc import Sequence
from pathlib import Path

from experiments.report.blocks import (
    Report,
    Results,
    Section,
    Table,
    capital,
    claims,
    diverged,
    listed,
    mean_sd,
)
from experiments.report.figures import curves, picture

_TASKS = {"max": "max retrieval", "copy": "copying", "reverse": "reversing", "sort": "sorting"}
WORDS = {
    "none": "no positions",
    "log-n": "none, log-n logits",
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


def words(scheme: str) -> str:
    """Return the words for a scheme."""
    return WORDS.get(scheme, scheme)


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings, ratios, length = results["settings"], results["ratios"], results["trained_length"]
    how = (
        f"A causal Transformer of two layers, width 64 and four heads is trained for "
        f"{settings['steps']:,} steps of {settings['batch_size']} lists of 1 to {length} symbols, "
        "and tested on new lists of that length and longer ones. Right is the share of answered "
        "symbols that are right, each given the right ones before it. The rotary variants are one "
        "trained model, tested with a scaling."
    )
    panels, tables = [], []
    for task, rows in results["accuracy"].items():
        series = {
            words(scheme): [
                [(r, 100 * values[seed]) for r, values in zip(ratios, row, strict=True)]
                for seed in range(len(row[0]))
            ]
            for scheme, row in rows.items()
        }
        panels.append((_TASKS[task], series))
        tables.append(
            Table(
                f"{capital(_TASKS[task])}: right answers, by length "
                f"(chance {100 * results['chance'][task]:.0f} %)",
                ["scheme", *(f"{r} × {length}" for r in ratios)],
                [[words(s), *(mean_sd(v, percent=True) for v in row)] for s, row in rows.items()],
            )
        )
    drawn = picture(
        folder, "accuracy", curves, panels, x="test length / trained length", y="right, %",
        log_x=True, markers=True, low_y=0, mark_y=(10.0, "chance"),
        alt="Right answers with each scheme against test length; the numbers are in the tables "
        "below.",
        caption="Right answers against test length over trained length, mean and range over the "
        "seeds.",
    )  # fmt: skip
    return Report(
        title="Train short, test long: positions",
        question=results["question"],
        answer=[said for task in results["accuracy"] for said in _answer(results, task)],
        warnings=diverged(
            (f"{_TASKS[m['task']]} with {words(m['scheme'])}, seed {m['seed']},", m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            Section("Accuracy against length", [how], [drawn, *tables]),
            Section(
                "What the papers say",
                [],
                [claims((*row[:2], _ours(results, row[2])) for row in _PAPERS)],
            ),
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


def _answer(results: Results, task: str) -> list[str]:
    rows, ratios, good = results["mean_accuracy"][task], results["ratios"], learnt(results, task)
    if not good:
        return [
            f"No scheme has learnt {_TASKS[task]} in {results['settings']['steps']:,} steps "
            f"(right at least {100 * _LEARNT:.0f} % at the trained length), so nothing can be "
            "said of longer lists."
        ]
    said = []
    if len(ratios) > 1:
        means = listed(kept(results, task), ".0f", percent=True, words=words)
        said.append(
            f"{capital(_TASKS[task])}, right on average over {ratios[1]} to {ratios[-1]} times the "
            f"trained length: {means}."
        )
    poor = {s: row[0] for s, row in rows.items() if s not in good}
    if poor:
        share = listed(poor, ".0f", percent=True, words=words)
        said.append(f"{capital(_TASKS[task])} is not learnt in so few steps with {share}.")
    return said


def _ours(results: Results, schemes: Sequence[str]) -> str:
    """Return what was measured of these schemes at the longest test, in words."""
    parts = []
    for task, rows in results["mean_accuracy"].items():
        found = {s: rows[s][-1] for s in schemes if s in rows}
        if found:
            shares = listed(found, ".0f", percent=True, words=words)
            parts.append(f"{_TASKS[task]} at {results['ratios'][-1]} times the length: {shares}")
    return "; ".join(parts)


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
