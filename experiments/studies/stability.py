"""At which learning rates attention still learns, and what widens the range."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_choice, check_positive, flag
from experiments.errors import UsageError

# What each form is told; the last three are the second with one thing changed.
FORMS = ("no scale", "1/√d", "clipping", "QK norm", "soft cap")


@dataclasses.dataclass(frozen=True)
class Stability(StudyOptions):
    """At which learning rates does attention still learn, and what widens the range?

    Associative recall with one attention layer, over a sweep of learning rates: with no scale, with
    1/√d, and with 1/√d and one remedy more: gradients clipped, queries and keys normalised, logits
    soft-capped. Held-out loss by learning rate; entropy, largest logit and gradient norm over the
    steps; what the doctor finds in each.

    Beside it: Zhai et al. 2023 (arXiv 2303.06296), entropy collapse precedes divergence; Henry et
    al. 2020 (2010.04245), normalised queries and keys; Vaswani et al. 2017 (1706.03762) §3.2.1.

    Command: python -m experiments stability. Takes 4 minutes on two cores; quick 50 s, full 15
    minutes.
    Expected: at a high learning rate logits grow and entropy falls to 0 before anything is learnt;
    a norm or a cap bounds the logits; without a scale the softmax is saturated from the start.
    """

    learning_rates: tuple[float, ...] | None = None
    """The highest learning rate of each training, after the warm-up."""
    forms: tuple[str, ...] = FORMS
    """Of "no scale", "1/√d", "clipping", "QK norm", "soft cap"."""
    steps: int | None = None
    """Training steps of each model."""
    batch_size: int = 32
    """Problems in a batch."""
    depth: int = 64
    """Depth of the one head."""
    pairs: int = 32
    """Pairs to remember (S)."""
    queries: int = 16
    """Questions on each list (T)."""
    clip: float = 1.0
    """The largest gradient norm, where it is clipped."""
    cap: float = 30.0
    """The bound of the logits, where they are soft-capped."""

    study: ClassVar[str] = "stability"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"learning_rates": (0.003, 0.03, 0.3), "steps": 100, "seeds": 1},
        "default": {"learning_rates": (0.001, 0.01, 0.1, 1.0), "steps": 250, "seeds": 3},
        "full": {"learning_rates": (0.0003, 0.001, 0.01, 0.1, 1.0), "steps": 1500, "seeds": 3},
    }

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        for form in self.forms:
            check_choice("--forms", form, FORMS)
        for name in ("forms", "learning_rates"):
            given = getattr(self, name)
            if given is not None and (not given or len(set(given)) < len(given)):
                raise UsageError(f"{flag(name)} must name at least one, each once")
        for name in ("steps", "batch_size", "depth", "queries"):
            check_positive(flag(name), getattr(self, name))
        if not 2 <= self.pairs <= _WORDS:
            raise UsageError(f"--pairs {self.pairs} must be 2 to {_WORDS}")
        for name, values in (
            ("--learning-rates", self.learning_rates or ()),
            ("--clip", (self.clip,)),
            ("--cap", (self.cap,)),
        ):
            for value in values:
                if not 0 < value < math.inf:
                    raise UsageError(f"{name} {value} must be a positive number")

    def run(self) -> Path:
        """Train each form at each learning rate and write the report."""
        from experiments.compiling import Executables
        from experiments.progress import Progress
        from experiments.reports.stability import build

        models = list(
            itertools.product(self.forms, self.learning_rates or (), range(self.seeds or 1))
        )
        with RunFolder.open(self) as folder, Progress(len(models) * (self.steps or 0)) as progress:
            executables = Executables()
            cells = [_trained(self, folder, progress, executables, *model) for model in models]
            return folder.conclude(_results(self, cells), build)


_QUESTION = (
    "A learning rate that is too high lets the logits of attention grow until the softmax is "
    "frozen on single keys. How high may it be, and what do the right scale, clipping, normalised "
    "queries and keys, and a cap on the logits each change?"
)
_WORDS = 64
_WIDTH = 64
_LOOKS = 15


def _trained(
    options: Stability, folder: RunFolder, progress: Any, executables: Any, *model: Any
) -> dict[str, Any]:
    """Return the finished cell of one model, training it if it is not there."""
    form, rate, seed = model
    key = f"form{FORMS.index(form)}-rate{rate:g}-seed{seed}"
    if folder.has(key):
        progress.skip(options.steps)
    cell = folder.cell(key, lambda: _train(options, folder, progress, executables, key, *model))
    folder.drop_checkpoints(key)
    return cell


def _train(
    options: Stability, folder: RunFolder, progress: Any, executables: Any, key: str,
    form: str, rate: float, seed: int,
) -> dict[str, Any]:  # fmt: skip
    import numpy as np

    from experiments.data import tasks
    from experiments.models import recall
    from experiments.sweep import SweptRecipe
    from experiments.train import train

    sizes = {"pairs": options.pairs, "queries": options.queries, "words": _WORDS}

    def problems(step: int, size: int) -> tasks.Batch:
        return tasks.recall(np.random.default_rng([seed, step]), size=size, **sizes)

    held_out = problems(2**31, 256)
    steps = options.steps or 1
    _, history = train(
        _model(options, form, seed),
        recall.loss,
        lambda step: problems(step, options.batch_size),
        SweptRecipe(
            steps=steps,
            learning_rate=rate,
            warmup=max(1, steps // 20),
            observe_every=max(1, steps // _LOOKS),
            checkpoint_every=max(100, steps // 5),
            clip=options.clip if form == "clipping" else math.inf,
        ),
        seed=seed,
        observe=lambda model: {k: float(v) for k, v in recall.observe(model, held_out).items()},
        checkpoints=folder.checkpoints(key),
        progress=progress,
        name=f"{form}, learning rate {rate:g}, seed {seed}",
        executables=executables,
    )
    return {
        "form": form,
        "learning_rate": rate,
        "seed": seed,
        "loss": history.loss,
        "gradient_norm": history.gradient_norm,
        "observed": history.observed,
        "step_milliseconds": history.step_milliseconds(),
        "diverged_at": history.diverged_at,
    }


def _model(options: Stability, form: str, seed: int) -> Any:
    """Return a fresh model of one form."""
    from flax import nnx

    from attention_jax import scores
    from experiments.models.recall import Recall

    scale = 1.0 if form == "no scale" else options.depth**-0.5
    told: dict[str, Any] = {}
    if form == "QK norm":
        told["normalize_qk"] = True
    if form == "soft cap":
        told["score"] = scores.soft_cap(scores.scaled_dot(scale), options.cap)
    return Recall(_WORDS, _WIDTH, options.depth, scale, rngs=nnx.Rngs(seed), **told)


def _results(options: Stability, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what results.json holds."""
    from experiments import curve_checks

    found = curve_checks.trained_models({"study": options.study, "models": cells})
    models = [
        {**cell, "findings": list(curve_checks.examine(model).names)}
        for cell, model in zip(cells, found, strict=True)
    ]
    summary = {}
    for form in options.forms:
        rows = [
            [m for m in models if m["form"] == form and m["learning_rate"] == rate]
            for rate in options.learning_rates or ()
        ]
        summary[form] = {
            **{
                name: [[m["observed"][-1][name] for m in row] for row in rows]
                for name in ("valid_loss", "accuracy", "entropy", "max_logit")
            },
            "learnt": [sum(map(_learnt, row)) for row in rows],
        }
    return {
        "question": _QUESTION,
        "learning_rates": list(options.learning_rates or ()),
        "summary": summary,
        "models": models,
    }


def _learnt(model: Mapping[str, Any]) -> bool:
    """Return whether training ended well: held-out loss half of what it was, or less."""
    first, last = (model["observed"][i]["valid_loss"] for i in (0, -1))
    if model["diverged_at"] is not None or first is None or last is None:
        return False
    return last <= first / 2
