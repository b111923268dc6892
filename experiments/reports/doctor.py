"""The report of the doctor: the findings in the models of a run."""

from collections import Counter
from pathlib import Path
from typing import Any

from experiments.report.blocks import (
    Block,
    Report,
    Results,
    Section,
    Table,
    joined,
    known,
    number,
    observations,
)
from experiments.report.figures import curves, picture

_PANEL = 11  # curves that can be told apart
_QUANTITIES = {
    "valid_loss": "Held-out loss, nats",
    "entropy": "Entropy of the attention / ln n",
    "max_logit": "Largest logit",
}


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    examined, findings = results["examined"], results["findings"]
    how = (
        f"The run of {examined['study']} in {examined['folder']}, started "
        f"{examined['started'].replace('T', ' ')}, from its results.json. Nothing was trained "
        "again."
    )
    columns = ["finding", "model", "symptom", "evidence", "likely cause", "remedy"]
    keys = ("name", "where", "symptom", "evidence", "cause", "remedy")
    table = Table("What was found", columns, [[f[key] for key in keys] for f in findings], "", True)
    return Report(
        title=f"A run of {examined['study']}, examined",
        question=results["question"],
        answer=_answer(results),
        warnings=[f"Not examined: {note}." for note in results["left_out"]],
        sections=[
            Section("Findings", [how], [table] if findings else []),
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
    listed = joined(f"{name} ({times})" for name, times in kinds.most_common())
    first = {f["name"]: f for f in reversed(results["findings"])}
    return [
        f"{ill} of {count} models {'has' if ill == 1 else 'have'} findings: {listed}.",
        *(
            f"{name}: {first[name]['symptom']}. Remedy: {first[name]['remedy']}."
            for name, _ in kinds.most_common()
        ),
    ]


def _models(results: Results) -> Table:
    def moved(model: Results, name: str) -> str:
        ends = [model["observed"][i].get(name) for i in (0, -1)]
        return " → ".join(number(v, ".3g") for v in ends) if ends != [None, None] else "–"

    rows = [
        [
            model["name"],
            *(moved(model, name) for name in _QUANTITIES),
            number(max(known(v for _, v in model["gradient_norm"]), default=None), ".3g"),
            number(model["diverged_at"], "d"),
            joined(model["findings"]) or "none",
        ]
        for model in results["models"]
    ]
    columns = [
        "model", "held-out loss", "entropy", "largest logit", "largest gradient norm",
        "diverged at step", "findings",
    ]  # fmt: skip
    return Table("Each model, before → after training", columns, rows)


def _pictures(results: Results, folder: Path) -> list[Block]:
    """Draw the quantities that were observed: of the models with findings first."""
    models = sorted(results["models"], key=lambda model: not model["findings"])[:_PANEL]
    whole = len(models) == len(results["models"])
    of = "all models" if whole else f"{len(models)} of the models, those with findings first"
    series: dict[str, Any] = {
        name: {model["name"]: [observations(model, name)] for model in models}
        for name in _QUANTITIES
    }
    return [
        picture(
            folder, name, curves, [("", series[name])], x="step", y=words,
            alt=f"{words} over the steps; the ends are in the table.", caption=f"{words}, {of}.",
        )
        for name, words in _QUANTITIES.items()
        if any(run for runs in series[name].values() for run in runs)
    ]  # fmt: skip
