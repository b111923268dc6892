"""What the scale of the dot product does, before and during training."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_positive, flag
from experiments.errors import UsageError

# Exponent p of the scale 1 / depth^p, by what it is called.
SCALES = {"no scale": 0.0, "too weak": 0.25, "1/√d": 0.5, "too strong": 1.0}


@dataclasses.dataclass(frozen=True)
class Scaling(StudyOptions):
    """What does the scale 1/√d do to attention, before and during training?

    Without training: entropy, largest weight and the norm of the softmax's Jacobian, by depth, of
    the unscaled dot, the scaled dot and the additive score. In training, on associative recall:
    loss, entropy and gradient norm over the steps with no scale, 1/√d, one too strong (1/d: the
    weights flatten) and one too weak (1/d^¼: they sharpen).

    Beside it: Vaswani et al. 2017 (arXiv 1706.03762) §3.2.1, and "unscaled starts slowly;
    entropy is what to watch".

    Command: python -m experiments scaling. Takes 3 minutes on two cores; quick 30 s, full 12
    minutes.
    Expected: unscaled weights are nearly one-hot at depth 256 and above, scaled ones do not change
    with the depth; in training, no scale starts sharp and learns slowest at large depth.
    """

    depths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    """Depths of the table without training."""
    train_depths: tuple[int, ...] | None = None
    """Depths to train at."""
    steps: int | None = None
    """Training steps of each model."""
    batch_size: int = 32
    """Problems in a batch."""
    learning_rate: float = 1e-3
    """The highest learning rate, after the warm-up."""
    pairs: int = 32
    """Pairs to remember (S)."""
    queries: int = 16
    """Questions on each list (T)."""

    study: ClassVar[str] = "scaling"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"train_depths": (256,), "steps": 150, "seeds": 1},
        "default": {"train_depths": (64, 512), "steps": 500, "seeds": 3},
        "full": {"train_depths": (64, 256, 1024), "steps": 1500, "seeds": 5},
    }

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        for name in ("steps", "batch_size", "pairs", "queries"):
            check_positive(flag(name), getattr(self, name))
        check_positive("--learning-rate", self.learning_rate, least=0)
        for name in ("depths", "train_depths"):
            if not getattr(self, name, None):
                raise UsageError(f"{flag(name)} is empty; give at least one, as {flag(name)} 64")
            for value in getattr(self, name) or ():
                check_positive(flag(name), value)

    def run(self) -> Path:
        """Make the table, train, and write the report."""
        from experiments import untrained
        from experiments.compiling import Executables
        from experiments.progress import Progress
        from experiments.reports.scaling import build

        seeds = range(self.seeds)
        models = [(d, name, s) for d in self.train_depths for name in SCALES for s in seeds]
        with RunFolder.open(self) as folder, Progress(len(models) * self.steps) as progress:
            table = [
                folder.cell(
                    f"untrained-depth{depth}-seed{seed}",
                    functools.partial(untrained.measure, depth, seed),
                )
                for depth in self.depths
                for seed in seeds
            ]
            executables = Executables()
            trained = [_trained(self, folder, progress, executables, *model) for model in models]
            results = {"question": _QUESTION, "untrained": table, "trained": trained}
            return folder.conclude(results, build)


_QUESTION = (
    "The dot product of two random vectors of depth d has standard deviation √d. Dividing by √d "
    "takes that out again. What happens to the attention weights, and to the training, without the "
    "division, and with one that is too strong or too weak?"
)
_WORDS = 64
_WIDTH = 64


def _trained(
    options: Scaling,
    folder: RunFolder,
    progress: Any,
    executables: Any,
    depth: int,
    name: str,
    seed: int,
) -> dict[str, Any]:
    """Return the finished cell of one model, training it if it is not there."""
    key = f"depth{depth}-p{SCALES[name]:g}-seed{seed}"
    if folder.has(key):
        progress.skip(options.steps)
    cell = folder.cell(
        key, lambda: _train(options, folder, progress, executables, key, depth, name, seed)
    )
    folder.drop_checkpoints(key)
    return cell


def _train(
    options: Scaling,
    folder: RunFolder,
    progress: Any,
    executables: Any,
    key: str,
    depth: int,
    name: str,
    seed: int,
) -> dict[str, Any]:
    import numpy as np
    from flax import nnx

    from experiments.data import tasks
    from experiments.models import recall
    from experiments.train import Recipe, train

    scale = float(depth) ** -SCALES[name]
    model = recall.Recall(_WORDS, _WIDTH, depth, scale, rngs=nnx.Rngs(seed))
    sizes = {"pairs": options.pairs, "queries": options.queries, "words": _WORDS}

    def problems(step: int, size: int) -> tasks.Batch:
        return tasks.recall(np.random.default_rng([seed, step]), size=size, **sizes)

    held_out = problems(2**31, 256)
    every = max(1, options.steps // 25)
    _, history = train(
        model,
        recall.loss,
        lambda step: problems(step, options.batch_size),
        Recipe(
            steps=options.steps,
            learning_rate=options.learning_rate,
            warmup=options.steps // 20,
            observe_every=every,
            checkpoint_every=max(100, options.steps // 5),
        ),
        seed=seed,
        observe=lambda model: _floats(recall.observe(model, held_out)),
        checkpoints=folder.checkpoints(key),
        progress=progress,
        name=f"depth {depth}, {name}, seed {seed}",
        executables=executables,
    )
    return {
        "depth": depth,
        "name": name,
        "scale": scale,
        "seed": seed,
        "loss": history.loss,
        "gradient_norm": history.gradient_norm,
        "observed": history.observed,
        "step_milliseconds": history.step_milliseconds(),
        "diverged_at": history.diverged_at,
    }


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
