"""Training a `Reader` on a task, the same for all studies that do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.data.tasks import Batch
from experiments.models import reader
from experiments.models.reader import Reader
from experiments.models.seq2seq import parameters
from experiments.progress import Progress
from experiments.train import History, Recipe, train

HELD_OUT_SIZE = 128


def train_reader(
    model: Reader,
    batch_at: Callable[[int], Batch],
    held_out: Batch,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    checkpoints: Path,
    progress: Progress,
    name: str,
    executables: Any,
    besides: Sequence[Callable[[], Any]] = (),
) -> tuple[Any, History]:
    """Train ``model`` and observe it some ten times; see `experiments.train.train`."""

    def observe(model: Any) -> dict[str, float | None]:
        return dict(reader.observe(model, held_out))

    recipe = Recipe(
        steps=steps,
        learning_rate=learning_rate,
        warmup=max(1, steps // 20),
        observe_every=max(1, steps // 10),
        checkpoint_every=max(100, steps // 5),
    )
    loss: Any = reader.loss
    trained, history = train(
        model,
        loss,
        batch_at,
        recipe,
        seed=seed,
        observe=observe,
        checkpoints=checkpoints,
        progress=progress,
        name=name,
        executables=executables,
        ahead=[batch_at(0)],
        besides=[lambda: reader.prepare_observe(model, held_out), *besides],
    )
    return trained, history


def record(model: Reader, history: History) -> dict[str, Any]:
    """Return what is kept of a trained model."""
    last = history.observed[-1]
    return {
        "parameters": parameters(model),
        "accuracy": last["accuracy"],
        "valid_loss": last["valid_loss"],
        "observed": history.observed,
        "loss": history.loss,
        "step_milliseconds": history.step_milliseconds(),
        "diverged_at": history.diverged_at,
    }
