"""The report of the doctor: what ails the models of a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import figures
from experiments.report.blocks import (
    Block,
    Picture,
    Report,
    Row,
    Section,
    Table,
    joined,
    known,
    number,
)

Results = Mapping[str, Any]
_PANEL = 11  # curves that can be told apart
_QUANTITIES = {
    "valid_loss": "Held-out loss, nats",
    "entropy": "Entropy of the attention / ln n",
    "max_logit": "Largest logit",
}


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    examined = results["examined"]
    how = (
        f"The run of {examined['study']} in {examined['folder']}, started "
        f"{examined['started'].replace('T', ' ')}, as its results.json tells of it. Nothing was "
        "trained anew."
    )
    return Report(
        title=f"A run of {examined['study']}, examined",
        question=results["question"],
        answer=_answer(results),
        warnings=[f"Not examined: {note}." for note in results["left_out"]],
        sections=[
            Section("Findings", [how], [_findings(results)] if results["findings"] else []),
            Section("The models", [], [_models(results), *_pictures(results, folder)]),
        ],
    )


def _answer(results: Results) -> list[str]:
    count = len(results["models"])
    if not results["findings"]:
        what = "1 model: its curves" if count == 1 else f"{count} models: their curves"
        return [f"Nothing was found in {what} look healthy."]
    ill = sum(bool(model["findings"]) for model in results["models"])
    kinds = Counter(finding["name"] for finding in results["findings"])
    listed = joined([f"{name} ({times})" for name, times in kinds.most_common()])
    first = {f["name"]: f for f in reversed(results["findings"])}
    return [
        f"{ill} of {count} models {'has' if ill == 1 else 'have'} findings: {listed}.",
        *(
            f"{name}: {first[name]['symptom']}. Remedy: {first[name]['remedy']}."
            for name, _ in kinds.most_common()
        ),
    ]


def _findings(results: Results) -> Table:
    rows = [
        Row([f["name"], f["where"], f["symptom"], f["evidence"], f["cause"], f["remedy"]])
        for f in results["findings"]
    ]
    columns = ["finding", "model", "symptom", "evidence", "likely cause", "remedy"]
    return Table("What was found", columns, rows, prose=True)


def _models(results: Results) -> Table:
    rows = []
    for model in results["models"]:
        norms = known(v for _, v in model["gradient_norm"])
        rows.append(
            Row(
                [
                    model["name"],
                    *(_moved(model["observed"], name) for name in _QUANTITIES),
                    f"{max(norms):.3g}" if norms else "–",
                    "–" if model["diverged_at"] is None else str(model["diverged_at"]),
                    joined(model["findings"]) or "none",
                ]
            )
        )
    return Table(
        "Each model, before → after training",
        [
            "model", "held-out loss", "entropy", "largest logit", "largest gradient norm",
            "diverged at step", "findings",
        ],
        rows,
    )  # fmt: skip


def _moved(observed: Sequence[Mapping[str, Any]], name: str) -> str:
    ends = [observed[0].get(name), observed[-1].get(name)]
    if ends == [None, None]:
        return "–"
    return " → ".join(number(v, ".3g") for v in ends)


def _pictures(results: Results, folder: Path) -> list[Block]:
    """Draw the quantities that were observed: of the models with findings first."""
    models = sorted(results["models"], key=lambda model: not model["findings"])[:_PANEL]
    whole = len(models) == len(results["models"])
    drawn: list[Block] = []
    for name, words in _QUANTITIES.items():
        series = {
            model["name"]: [[(row["step"], row[name]) for row in model["observed"] if name in row]]
            for model in models
        }
        if not any(run for runs in series.values() for run in runs):
            continue
        file = f"figures/{name}.png"
        figures.curves(folder / file, [("", series)], x="step", y=words)
        of = "all models" if whole else f"{len(models)} of the models, those with findings first"
        drawn.append(
            Picture(file, f"{words} over the steps; the ends are in the table.", f"{words}, {of}.")
        )
    return drawn
