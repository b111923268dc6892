"""Checks of the curves of a finished run: the findings of `diagnose`, and four further rules.

`attention_jax.diagnostics.diagnose` examines the history of one model: whether training diverged or
entropy collapsed as logits grew. The rules here are in `RULES`, with findings of the same form.
"""

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention_jax.diagnostics import Diagnosis, Finding, diagnose
from experiments.errors import UsageError
from experiments.files import read_json, short

Points = list[tuple[int, float | None]]

# The key of each study's trained models, and the keys that identify a model.
MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compare": ("models", ("score",)),
    "scaling": ("trained", ("depth", "name")),
    "long": ("models", ("task", "name")),
    "positions": ("models", ("task", "scheme")),
    "stability": ("models", ("form", "learning_rate")),
    "prune": ("models", ()),
    "distill": ("models", ("way",)),
}


class Trained(NamedTuple):
    """The curves of one model of a run.

    Attributes:
        name: the study's name of the model, with its seed.
        seed: its seed.
        observed: the observations: step, held-out loss and, where recorded, entropy (over ln n) and
            largest logit.
        loss: training loss by step.
        gradient_norm: gradient norm by step; empty where the study records none.
        diverged_at: the step at which training diverged, or None.
    """

    name: str
    seed: int
    observed: Sequence[Mapping[str, Any]]
    loss: Points
    gradient_norm: Points
    diverged_at: int | None

    def curve(self, name: str) -> Points:
        """Return the observations of one quantity, by step; empty where there are none."""
        seen = [(row["step"], row.get(name)) for row in self.observed]
        return seen if any(value is not None for _, value in seen) else []

    def values(self, name: str) -> list[float]:
        """Return the finite observations of one quantity."""
        return [v for _, v in self.curve(name) if v is not None and math.isfinite(v)]


class Rule(NamedTuple):
    """A rule: its texts are formatted with the numbers that its condition returns, if it does."""

    name: str
    condition: Callable[[Trained], dict[str, Any] | None]
    symptom: str
    evidence: str
    cause: str
    remedy: str


def _entropy(fits: Callable[[float, float], bool]) -> Callable[[Trained], dict[str, Any] | None]:
    def condition(model: Trained) -> dict[str, Any] | None:
        values = model.values("entropy")
        if not values or not fits(values[0], values[-1]):
            return None
        return {"before": values[0], "after": values[-1]}

    return condition


def _stalled(rising: bool) -> Callable[[Trained], dict[str, Any] | None]:
    """Return the condition that held-out loss ends above 98 % of its start, or above 105 %."""

    def condition(model: Trained) -> dict[str, Any] | None:
        first, last = (model.observed[i].get("valid_loss") for i in (0, -1))
        if first is None or last is None or last <= 0.98 * first:
            return None
        numbers = {"before": first, "after": last, "steps": model.observed[-1]["step"]}
        return numbers if (last > 1.05 * first) == rising else None

    return condition


def _leap(model: Trained) -> dict[str, Any] | None:
    norms = [(s, v) for s, v in model.gradient_norm if v is not None and math.isfinite(v)]
    norms = norms[len(norms) // 10 :]  # the first steps are steep anyway
    if len(norms) < 10:
        return None
    median = statistics.median(v for _, v in norms)
    step, norm = max(norms, key=lambda point: point[1])
    found = {"step": step, "norm": norm, "median": median, "times": norm / median if median else 0}
    return found if found["times"] > 20 else None


_NOT_LEARNING = (
    "the held-out loss does not fall",
    "{before:.4g} before training, {after:.4g} after {steps} steps",
)
RULES = (
    Rule(
        "no_scale", _entropy(lambda before, after: before < 0.5),  # a right scale leaves about 0.87
        "the softmax is saturated before the first step: little gradient passes it",
        "entropy {before:.3f} of ln n before training, {after:.3f} after",
        "dot products that are not divided by √H, or are divided by too little",
        'score="scaled_dot", or scores.scaled_dot() in place of dot()',
    ),
    Rule(
        "too_even", _entropy(lambda before, after: after >= 0.995),
        "after training every query still weighs all visible keys alike",
        "entropy {after:.4f} of ln n at the end",
        "a scale far below 1/√H, or too few steps for logits to grow",
        "score=scores.scaled_dot(), a higher --learning-rate, or more --steps",
    ),
    Rule(
        "not_learning", _stalled(rising=True), *_NOT_LEARNING,
        "a learning rate too high", "a lower --learning-rate, or normalize_qk=True",
    ),
    Rule(
        "not_learning", _stalled(rising=False), *_NOT_LEARNING,
        "too few steps, or too small a learning rate",
        "more --steps, or another --learning-rate",
    ),
    Rule(
        "gradient_leap", _leap, "the gradient leaps",
        "norm {norm:.3g} at step {step}, {times:.0f} times the median {median:.3g}",
        "a batch or a region in which the loss is steep; without clipping one such step undoes "
        "many",
        "optax.clip_by_global_norm(1.0) before the optimiser, or a lower --learning-rate",
    ),
)  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """Return the results.json of a finished run whose models can be examined.

    Raises:
        UsageError: there is none, or nothing in it was trained.
    """
    file = folder / "results.json"
    try:
        results = read_json(file)
        study = str(results["study"])
        missing = {"started", "settings", "status"} - results.keys()
    except OSError:
        unfinished = os.path.exists(folder / "run.json")
        why = "the run in it is not finished" if unfinished else "it is no folder of a run"
        raise UsageError(f"{short(folder)} has no results.json: {why}") from None
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
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
        found = trained_models(results)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        found, missing = [], {"models"}
    if missing:
        raise UsageError(f"{file} does not have the form of a run of {study}")
    if not found:
        raise UsageError(f"{folder} holds no trained model")
    return results


def trained_models(results: Mapping[str, Any], seeds: int | None = None) -> list[Trained]:
    """Return the models of a run; with ``seeds``, those of its first seeds alone."""
    where, named = MODELS[results["study"]]
    found = []
    for model in results[where]:
        train = model.get("train", model)
        words = [*(str(model[key]) for key in named), f"seed {model['seed']}"]
        curves = _points(train["loss"]), _points(train.get("gradient_norm") or ())
        name, seed = ", ".join(words), model["seed"]
        found.append(Trained(name, seed, train["observed"], *curves, train["diverged_at"]))
    return [model for model in found if seeds is None or model.seed < seeds]


def _points(curve: Sequence[Any]) -> Points:
    return [(int(step), value) for step, value in curve]


def examine(model: Trained) -> Diagnosis:
    """Return the findings in one model's curves."""
    found = diagnose(history=_history(model))
    findings = list(found.findings)
    for rule in RULES:
        if (numbers := rule.condition(model)) is not None:
            symptom, evidence, cause, remedy = (text.format(**numbers) for text in rule[2:])
            findings.append(
                Finding(rule.name, model.name, symptom, evidence, cause, remedy, numbers)
            )
    notes = [
        f"{words}: {model.name} does not record {name}"
        for name, words in (
            ("entropy", "where attention looks"),
            ("max_logit", "whether entropy collapses as logits grow"),
        )
        if not model.curve(name)
    ]
    return Diagnosis(tuple(findings), found.examined, tuple(notes))


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


def _history(model: Trained) -> list[dict[str, Any]]:
    """Return the observations in the form of `attention_jax.diagnostics.history`."""
    rows = []
    # Quantities that were not recorded are 0 throughout, so no rule applies to them.
    curves = {name: dict(model.curve(name)) for name in ("entropy", "max_logit")}
    losses = dict(model.curve("valid_loss"))
    for step in (row["step"] for row in model.observed):
        if step != model.diverged_at:
            fields = {name: curve[step] if curve else 0.0 for name, curve in curves.items()}
            row = {"step": step, "attention": {model.name: fields}}
            rows.append({**row, "loss": losses[step]} if step in losses else row)
    if model.diverged_at is not None:
        last = rows[-1]["attention"][model.name] if rows else {"entropy": 0.0, "max_logit": 0.0}
        fields = {**last, "loss or its gradient": None}
        rows.append({"step": model.diverged_at, "attention": {model.name: fields}})
    return rows
