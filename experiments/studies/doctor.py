"""What ails the models of a finished run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tyro

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions
from experiments.errors import UsageError


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
    seeds: int | None = None
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
        from experiments.reports.doctor import build

        # The run comes first: if it cannot be examined, no folder is made.
        examined = curve_checks.read(Path(self.run_folder))
        found = curve_checks.trained_models(examined, self.seeds)
        with RunFolder.open(self) as folder:
            diagnoses = [curve_checks.examine(model) for model in found]
            print(curve_checks.together(diagnoses))
            return folder.conclude(_results(self, examined, found, diagnoses), build)


_QUESTION = (
    "A run has finished, well or badly. Do the curves of its models show one of the known troubles "
    "of attention, at which step does it begin, and what would help?"
)


def _results(
    options: Doctor, examined: Mapping[str, Any], found: list[Any], diagnoses: list[Any]
) -> dict[str, Any]:
    """Return what results.json holds."""
    from experiments import curve_checks

    return {
        "question": _QUESTION,
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
