"""Training of a model by a task and a recipe, on a mesh, resumable.

The batch of step t depends only on the seed and t, and a checkpoint holds the whole state, so that
a resumed run gives the same numbers. Metrics are appended to a file of JSON lines; a checkpoint
holds its length and digest.

    {"step": 1, "loss": 4.2, "gradient_norm": 1.3, "seconds": 0.02}
    {"step": 50, "observed": {"valid_loss": 3.1}}
"""

import dataclasses
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from experiments.core import checkpoint, measure, mesh, state, stop
from experiments.core.compiling import all_at_once, shapes_of
from experiments.core.optim import Recipe
from experiments.core.progress import Progress

Observed = dict[str, float | None]
_KEPT = ("compile_seconds", "temporaries", "diverged_at")


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of a training: model, loss and batches.

    Attributes:
        title: its name in the progress.
        model: newly built from ``seed``.
        loss: ``(model, batch, key) -> scalar``; the key is the step's, for dropout.
        batch_at: maps a step (from 0) to a batch, a tree of arrays; a pure function.
        seed: of the steps' keys.
        observe: returns metrics of the model, at the start, periodically, and at the end.
        ahead: a batch of each later shape; their steps are compiled before the first one.
        besides: functions that compile other functions of the model concurrently.
        tokens: the number of tokens of a batch, if it is to be shown.
    """

    title: str
    model: Any
    loss: state.Loss
    batch_at: Callable[[int], state.Batch]
    seed: int
    observe: Callable[[Any], Observed]
    ahead: Sequence[state.Batch] = ()
    besides: Sequence[Callable[[Any], Any]] = ()
    tokens: Callable[[state.Batch], int] | None = None


@dataclasses.dataclass
class History:
    """The history of a training by step; the first entry is step 1.

    Attributes:
        file: the JSON lines.
        loss: training loss of each step.
        gradient_norm: global norm of each step's gradient, before clipping.
        seconds: time of each step, without compiling.
        observed: one dict for each observation: ``step`` and the metrics of the task.
        compile_seconds: time spent compiling before the first step, over all sessions.
        temporaries: bytes of temporaries of the compiled step, by the batch's shapes.
        diverged_at: the step at which the loss, its gradient or an observation was not finite,
            where training ended; else None.
    """

    file: Path
    loss: list[float] = dataclasses.field(default_factory=list)
    gradient_norm: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    observed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    temporaries: dict[str, int] = dataclasses.field(default_factory=dict)
    diverged_at: int | None = None

    _bytes: int = 0
    _digest: Any = dataclasses.field(default_factory=hashlib.sha256)

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.loss)

    def step_milliseconds(self) -> float | None:
        """Return the median time of a step."""
        return statistics.median(self.seconds) * 1e3 if self.seconds else None

    def record(self) -> dict[str, Any]:
        """Return the entry of a training in results.json; curves are means over several steps."""
        return {
            "steps": self.step,
            "loss": _thinned(self.loss),
            "gradient_norm": _thinned(self.gradient_norm),
            "observed": self.observed,
            "step_milliseconds": self.step_milliseconds(),
            **{name: getattr(self, name) for name in _KEPT},
        }

    def add(self, fetched: Sequence[dict[str, Any]], seconds: float) -> None:
        """Add the metrics of some steps, up to the one that is not finite."""
        for metrics in fetched:
            step = {name: float(metrics[name]) for name in ("loss", "gradient_norm")}
            self._write({"step": self.step + 1, **step, "seconds": seconds / len(fetched)})
            if not metrics["alive"]:
                self.diverged_at = self.step
                return

    def observe(self, seen: Observed) -> None:
        """Add an observation; one that is not finite is a divergence."""
        self._write({"step": self.step, "observed": seen})
        if not all(value is None or math.isfinite(value) for value in seen.values()):
            self.diverged_at = self.step

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        self._take(line)
        if mesh.first():
            with self.file.open("ab") as lines:
                lines.write(line)

    def _take(self, line: bytes) -> None:
        row = json.loads(line)
        if "observed" in row:
            self.observed.append({"step": row["step"], **row["observed"]})
        else:
            for name in ("loss", "gradient_norm", "seconds"):
                getattr(self, name).append(row[name])
        self._bytes += len(line)
        self._digest.update(line)

    def mark(self) -> dict[str, Any]:
        """Return the history's part of a checkpoint: all but the lines, and their digest."""
        if mesh.first():
            with self.file.open("ab") as lines:
                os.fsync(lines.fileno())
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**kept, "bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def fault(self, mark: dict[str, Any]) -> str | None:
        """Return the error of the metrics lines before a checkpoint, or None."""
        content = self.file.read_bytes() if self.file.is_file() else b""
        same = hashlib.sha256(content[: mark["bytes"]]).hexdigest() == mark["sha256"]
        return None if same else f"{self.file.name} has changed"

    def go_on(self, mark: dict[str, Any] | None) -> None:
        """Go on from the lines of a checkpoint, those after it deleted; None begins anew."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if mark is not None:
            for name in _KEPT:
                setattr(self, name, mark[name])
            for line in self.file.read_bytes()[: mark["bytes"]].splitlines(keepends=True):
                self._take(line)
        mesh.barrier("history")
        if mesh.first():
            self.file.touch()
            os.truncate(self.file, self._bytes)


def _thinned(values: list[float]) -> list[list[float]]:
    """Return some 1000 pairs: a step, and the mean since the one before."""
    stretch = max(1, len(values) // 1000)
    parts = [values[at : at + stretch] for at in range(0, len(values), stretch)]
    return [[at * stretch + len(p), statistics.fmean(p)] for at, p in enumerate(parts)]


class Trained(NamedTuple):
    """A trained model and its history; of several processes each has the model on one device."""

    model: Any
    history: History


def train(
    task: Task,
    recipe: Recipe,
    *,
    checkpoints: Path,
    curves: Path,
    progress: Progress,
    on: Mesh | None = None,
    fully_sharded: bool = False,
) -> Trained:
    """Train a model, or go on with it from the last of its checkpoints.

    Args:
        task: the task.
        recipe: how long and how.
        checkpoints: folder of the states; made if missing.
        curves: file of the metrics.
        progress: where to show loss and time left.
        on: the mesh; None is one device.
        fully_sharded: whether parameters are divided over the data axis too.

    Returns:
        The model and its history. A loss, gradient or observation that is not finite ends training:
        ``history.diverged_at`` is its step, and the model is the one before it.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came, to any process; the state was saved first.
    """
    where = on or mesh.make(None)
    if where.shape["data"] > 1:
        mesh.check_batch(where, task.batch_at(0))
    graph, now = state.begin(task.model, recipe, task.seed)
    shardings = mesh.shardings(where, now, fully=fully_sharded)
    now = mesh.put(now, shardings)
    history, saved = History(curves), checkpoint.Checkpoints(checkpoints)
    restored = saved.restore(now, history.fault, progress.say)
    history.go_on(None if restored is None else restored.record)
    now = now if restored is None else restored.state
    step = state.Step(graph, task.loss, recipe, shardings)

    def observe() -> None:
        history.observe(task.observe(state.merged(graph, now)))

    def prepare(batch: state.Batch) -> tuple[Any, state.Batch]:
        placed = mesh.place(where, batch)
        made = step.executable(now, placed)
        shapes, analysis = shapes_of(batch), made.memory_analysis
        if shapes not in history.temporaries and (found := analysis()) is not None:
            history.temporaries[shapes] = found.temp_size_in_bytes
        return made, placed

    if history.step < recipe.steps and history.diverged_at is None:
        begun = time.perf_counter()
        model = state.merged(graph, now)
        others = (lambda f=f: f(model) for f in task.besides)
        all_at_once([*(lambda b=b: prepare(b) for b in task.ahead), *others])
        history.compile_seconds += time.perf_counter() - begun
    if not history.observed:
        observe()
    alone = mesh.count() == 1
    with progress.piece(task.title, recipe.steps, history.step) as piece, stop.held(), saved:
        done, pending, tokens, begun = history.step, [], 0, 0.0
        while done < recipe.steps and history.diverged_at is None:
            batch = task.batch_at(done)
            made, placed = prepare(batch)
            tokens += task.tokens(batch) if task.tokens else 0
            begun = begun if pending else time.perf_counter()
            now, metrics = made(now, placed)
            pending.append(metrics)
            done += 1
            last, look = done == recipe.steps, done % recipe.observe_every == 0
            save = done % recipe.checkpoint_every == 0
            due = done % recipe.fetch_every == 0 or (alone and stop.asked())
            if not (last or look or save or due):
                continue
            fetched = jax.device_get(pending)
            seconds = time.perf_counter() - begun
            history.add(fetched, seconds)
            speed = measure.speed(made, seconds / len(pending), tokens / seconds)
            piece.advance(f"loss {history.loss[-1]:.3f}{speed}", len(pending))
            pending, tokens = [], 0
            stopping = mesh.any_process(stop.asked())
            if look or last or history.diverged_at is not None:
                observe()
            last = last or history.diverged_at is not None
            if save or last or stopping:
                saved.save(history.step, now, history.mark())
            if stopping:
                saved.wait()
                mesh.leave()
                raise stop.Stopped
    mesh.barrier("trained")
    if history.diverged_at is not None:
        progress.say(
            f"{task.title}: diverged, the loss is not finite at step {history.diverged_at}"
        )
        progress.skip(recipe.steps - history.step)
    found = now.params, now.rest
    return Trained(nnx.merge(graph, *(mesh.gathered(found) if not alone else found)), history)
