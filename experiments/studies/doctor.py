"""Diagnosis of the models of a finished run."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, StudyOptions
from experiments.errors import UsageError
from experiments.report import blocks as report


@dataclasses.dataclass(frozen=True)
class Doctor(StudyOptions):
    """What ails the models of a finished run, why, and what to change?

    Reads the results.json of a run of compare, scaling, long, positions, stability, prune or
    distill: loss, gradient norms, entropy and largest logits over the steps, and where training
    broke. Each finding has a symptom, its evidence in numbers, the likely cause and a remedy.
    Nothing is trained, and the run stays as it is.

    Beside it: Vaswani et al. 2017 (arXiv 1706.03762) §3.2.1 on the scale, Zhai et al. 2023
    (2303.06296): entropy collapse comes before divergence.

    Command: python -m experiments doctor RUN. Takes 10 s.
    Expected: nothing in a healthy run; in one of scaling, the missing scale.
    """

    run_folder: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(name="", metavar="RUN")
    ] = None
    """The folder of the finished run to examine."""

    preset: str = "default"
    """How much of the run to examine: quick (its first seed), default (ten seeds) or full (all)."""
    seeds: int = FROM_PRESET
    """How many of the run's seeds to examine, the first ones."""

    study: ClassVar[str] = "doctor"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"seeds": 1},
        "default": {"seeds": 10},
        "full": {"seeds": 1000},
    }

    def run(self) -> Path:
        """Read the run, examine each of its models, print and report the findings."""
        if self.run_folder is None:
            raise UsageError("doctor needs the folder of a run: python -m experiments doctor RUN")
        from experiments import curve_checks

        # The run is read first: if it is invalid, no folder is made.
        examined = curve_checks.read(Path(self.run_folder))
        found = curve_checks.trained_models(examined, self.seeds)
        with RunFolder.open(self, 0) as run:
            diagnoses = [curve_checks.examine(model) for model in found]
            print(curve_checks.together(diagnoses))
            return run.conclude(_results(self, examined, found, diagnoses), build_report)


def _results(
    options: Doctor, examined: Mapping[str, Any], found: list[Any], diagnoses: list[Any]
) -> dict[str, Any]:
    """Return the study's part of results.json."""
    from experiments import curve_checks

    return {
        "examined": {
            "folder": str(options.run_folder),
            "study": examined["study"],
            "started": examined["started"],
            "settings": examined["settings"],
        },
        "findings": [
            {**dataclasses.asdict(finding), "numbers": dict(finding.numbers)}
            for diagnosis in diagnoses
            for finding in diagnosis
        ],
        "left_out": list(curve_checks.together(diagnoses).left_out),
        "models": [
            {
                "name": model.name,
                "seed": model.seed,
                "findings": list(diagnosis.names),
                "observed": list(model.observed),
                "loss": model.loss,
                "gradient_norm": model.gradient_norm,
                "diverged_at": model.diverged_at,
            }
            for model, diagnosis in zip(found, diagnoses, strict=True)
        ],
    }


_PANEL = 11  # distinguishable curves
_QUANTITIES = {
    "valid_loss": "Held-out loss, nats",
    "entropy": "Entropy of the attention / ln n",
    "max_logit": "Largest logit",
}


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    examined, findings = results["examined"], results["findings"]
    how = (
        f"The run of {examined['study']} in {examined['folder']}, started "
        f"{examined['started'].replace('T', ' ')}, from its results.json. Nothing was trained "
        "again."
    )
    columns = ["finding", "model", "symptom", "evidence", "likely cause", "remedy"]
    keys = ("name", "where", "symptom", "evidence", "cause", "remedy")
    table = report.Table(
        "What was found", columns, [[f[key] for key in keys] for f in findings], "", True
    )
    return report.Report(
        title=f"A run of {examined['study']}, examined",
        answer=_answer(results),
        warnings=[f"Not examined: {note}." for note in results["left_out"]],
        sections=[
            report.Section("Findings", [how], [table] if findings else []),
            report.Section("The models", [], [_models(results), *_pictures(results, folder)]),
        ],
    )


def _answer(results: report.Results) -> list[str]:
    count = len(results["models"])
    if not results["findings"]:
        what = "1 model: its curves" if count == 1 else f"{count} models: their curves"
        return [f"Nothing was found in {what} look healthy."]
    ill = sum(bool(model["findings"]) for model in results["models"])
    kinds = Counter(finding["name"] for finding in results["findings"])
    listed = report.joined(f"{name} ({times})" for name, times in kinds.most_common())
    first = {f["name"]: f for f in reversed(results["findings"])}
    return [
        f"{ill} of {count} models {'has' if ill == 1 else 'have'} findings: {listed}.",
        *(
            f"{name}: {first[name]['symptom']}. Remedy: {first[name]['remedy']}."
            for name, _ in kinds.most_common()
        ),
    ]


def _models(results: report.Results) -> report.Table:
    def moved(model: report.Results, name: str) -> str:
        ends = [model["observed"][i].get(name) for i in (0, -1)]
        return " → ".join(report.number(v, ".3g") for v in ends) if ends != [None, None] else "–"

    def norms(model: report.Results) -> list[float]:
        return report.known(v for _, v in model["gradient_norm"])

    rows = [
        [
            model["name"],
            *(moved(model, name) for name in _QUANTITIES),
            report.number(
                max(report.known(v for _, v in model["gradient_norm"]), default=None), ".3g"
            ),
            report.number(model["diverged_at"], "d"),
            report.joined(model["findings"]) or "none",
        ]
        for model in results["models"]
    ]
    columns = [
        "model", "held-out loss", "entropy", "largest logit", "largest gradient norm",
        "diverged at step", "findings",
    ]  # fmt: skip
    return report.Table("Each model, before → after training", columns, rows)


def _pictures(results: report.Results, folder: Path) -> list[report.Block]:
    """Draw the quantities that were observed: of the models with findings first."""
    models = sorted(results["models"], key=lambda model: not model["findings"])[:_PANEL]
    whole = len(models) == len(results["models"])
    of = "all models" if whole else f"{len(models)} of the models, those with findings first"
    seen = {n for model in models for row in model["observed"] for n in row if row[n] is not None}
    return [
        report.training(folder, models, name, f"{words}, {of}", line=lambda m: m["name"])
        for name, words in _QUANTITIES.items()
        if name in seen
    ]
