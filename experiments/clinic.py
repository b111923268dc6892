"""Examining a finished run: from its results.json to what `diagnose` and its curves tell.

`attention_jax.diagnostics.diagnose` reads the history of one model at a time: where training broke,
whether entropy collapsed while logits grew. What a run's curves tell beside it (a softmax that was
saturated before the first step, weights that stayed even, a loss that never fell, gradients that
leapt) is added here, in findings of the same form.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax.diagnostics import Diagnosis, Finding, diagnose
from experiments.errors import UsageError

Points = list[tuple[int, float | None]]

# Where each study keeps the models it trained, and which of their keys name one.
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compare": ("models", ("score",)),
    "scaling": ("trained", ("depth", "name")),
    "long": ("models", ("task", "name")),
    "positions": ("models", ("task", "scheme")),
    "stability": ("models", ("form", "learning_rate")),
    "prune": ("models", ()),
    "distill": ("models", ("way",)),
}
_EVEN = 0.995  # of ln n: a mean in all but name
_SATURATED = 0.5  # of ln n before training, where a right scale leaves about 0.87
_FELL = 0.98  # of the loss before training: what has fallen less has not fallen
_LEAP = 20.0  # times the median gradient norm


class Patient(NamedTuple):
    """One model of a run, as its results.json tells of it.

    Attributes:
        name: what the study calls it, seed included.
        seed: its seed.
        observed: the looks at it: step, held-out loss and, where recorded, entropy (over ln n) and
            largest logit.
        loss: training loss by step.
        gradient_norm: gradient norm by step; empty where the study keeps none.
        diverged_at: the step at which training broke, or None.
    """

    name: str
    seed: int
    observed: Sequence[Mapping[str, Any]]
    loss: Points
    gradient_norm: Points
    diverged_at: int | None

    def observations(self, name: str) -> Points:
        """Return what was observed of one quantity, by step; empty where it never was."""
        seen = [(row["step"], row.get(name)) for row in self.observed]
        return seen if any(value is not None for _, value in seen) else []


def read(folder: Path) -> dict[str, Any]:
    """Return the results.json of a finished run whose models can be examined.

    Raises:
        UsageError: there is none, or nothing in it was trained.
    """
    file = folder / "results.json"
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        study = results["study"]
    except OSError:
        unfinished = (folder / "run.json").exists()
        why = "the run in it is not finished" if unfinished else "it is no folder of a run"
        raise UsageError(f"{folder} has no results.json: {why}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{file} is not the results.json of a study") from None
    if study not in MODELS:
        raise UsageError(
            f"{folder} is a run of {study!r}, which trains no model; doctor examines runs of "
            + ", ".join(MODELS)
        )
    if results.get("status") != "finished":
        raise UsageError(
            f"{folder} is not finished; go on with it: python -m experiments {study} --out "
            f"{folder} --resume"
        )
    try:
        found = patients(results)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{file} does not have the form of a run of {study}") from None
    if not found:
        raise UsageError(f"{folder} holds no trained model")
    return results


def patients(results: Mapping[str, Any], seeds: int | None = None) -> list[Patient]:
    """Return the models of a run; with ``seeds``, those of its first seeds alone."""
    where, named = MODELS[results["study"]]
    found = []
    for model in results[where]:
        train = model.get("train", model)
        words = [*(str(model[key]) for key in named), f"seed {model['seed']}"]
        found.append(
            Patient(
                ", ".join(words),
                model["seed"],
                train["observed"],
                _points(train["loss"]),
                _points(train.get("gradient_norm") or ()),
                train["diverged_at"],
            )
        )
    return [p for p in found if seeds is None or p.seed < seeds]


def _points(curve: Sequence[Any]) -> Points:
    """Return a curve as pairs of step and value, in whichever form the study keeps it."""
    return [
        (int(v[0]), v[1]) if isinstance(v, list | tuple) else (i + 1, v)
        for i, v in enumerate(curve)
    ]


def examine(patient: Patient) -> Diagnosis:
    """Return what ails one model, by its history."""
    found = diagnose(history=_history(patient))
    findings = (*found.findings, *_curves(patient))
    notes = [
        f"{words}: {patient.name} does not record {name}"
        for name, words in (
            ("entropy", "where attention looks"),
            ("max_logit", "whether entropy collapses as logits grow"),
        )
        if not patient.observations(name)
    ]
    return Diagnosis(findings, found.examined, tuple(notes))


def together(diagnoses: Sequence[Diagnosis]) -> Diagnosis:
    """Return several diagnoses as one."""
    notes = dict.fromkeys(
        f"{note.split(':')[0]} (not recorded in this run)" for d in diagnoses for note in d.left_out
    )
    return Diagnosis(
        tuple(finding for d in diagnoses for finding in d),
        sum(d.examined for d in diagnoses),
        tuple(notes),
    )


def _history(patient: Patient) -> list[dict[str, Any]]:
    """Return the looks at a model in the form of `attention_jax.diagnostics.history`."""
    rows = []
    # What was not recorded is 0 throughout: it neither moves nor breaks, so nothing is found.
    curves = {name: dict(patient.observations(name)) for name in ("entropy", "max_logit")}
    losses = dict(patient.observations("valid_loss"))
    for step in (look["step"] for look in patient.observed):
        if step != patient.diverged_at:
            fields = {name: curve[step] if curve else 0.0 for name, curve in curves.items()}
            row = {"step": step, "attention": {patient.name: fields}}
            rows.append({**row, "loss": losses[step]} if step in losses else row)
    if patient.diverged_at is not None:
        last = rows[-1]["attention"][patient.name] if rows else {"entropy": 0.0, "max_logit": 0.0}
        fields = {**last, "loss or its gradient": None}
        rows.append({"step": patient.diverged_at, "attention": {patient.name: fields}})
    return rows


def _curves(patient: Patient) -> Iterator[Finding]:
    """Find what the curves tell beside `diagnose`."""
    entropy = [v for _, v in patient.observations("entropy") if v is not None]
    if entropy and entropy[0] < _SATURATED:
        yield Finding(
            "no_scale",
            patient.name,
            "the softmax is saturated before the first step: little gradient passes it",
            f"entropy {entropy[0]:.3f} of ln n before training, {entropy[-1]:.3f} after",
            "dot products that are not divided by √H, or are divided by too little",
            'score="scaled_dot", or scores.scaled_dot() in place of dot()',
            {"before": entropy[0], "after": entropy[-1]},
        )
    if entropy and entropy[-1] >= _EVEN:
        yield Finding(
            "too_even",
            patient.name,
            "after training every query still weighs all it sees alike",
            f"entropy {entropy[-1]:.4f} of ln n at the end",
            "a scale far below 1/√H, or too few steps for logits to grow",
            "score=scores.scaled_dot(), a higher --learning-rate, or more --steps",
            {"after": entropy[-1]},
        )
    held_out = [v for _, v in patient.observations("valid_loss")]
    first, last = held_out[0], held_out[-1]
    if first is not None and last is not None and last > _FELL * first:
        yield Finding(
            "not_learning",
            patient.name,
            "the held-out loss does not fall",
            f"{first:.4g} before training, {last:.4g} after {patient.observed[-1]['step']} steps",
            "a learning rate too high"
            if last > 1.05 * first
            else "too few steps, or too small a learning rate",
            "a lower --learning-rate, or normalize_qk=True"
            if last > 1.05 * first
            else "more --steps, or another --learning-rate",
            {"before": first, "after": last},
        )
    yield from _leaps(patient)


def _leaps(patient: Patient) -> Iterator[Finding]:
    norms = [(s, v) for s, v in patient.gradient_norm if v is not None and math.isfinite(v)]
    norms = norms[len(norms) // 10 :]  # the first steps are steep by nature
    if len(norms) < 10:
        return
    middle = statistics.median(v for _, v in norms)
    step, most = max(norms, key=lambda point: point[1])
    if most > _LEAP * middle > 0:
        yield Finding(
            "gradient_leap",
            patient.name,
            "the gradient leaps",
            f"norm {most:.3g} at step {step}, {most / middle:.0f} times the median {middle:.3g}",
            "a batch or a region in which the loss is steep; without clipping one such step undoes "
            "many",
            "optax.clip_by_global_norm(1.0) before the optimiser, or a lower --learning-rate",
            {"step": step, "norm": most, "median": middle},
        )
