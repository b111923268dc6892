"""Training: warm-up, Adam, clipping, checkpoints, and going on after a stop to the same numbers.

    g_t     = ∇ loss(θ_t; batch t)                       batch t depends on (seed, t) alone
    g_t     ← g_t · min(1, 1 / ‖g_t‖)
    θ_{t+1} = θ_t − η_t · Adam(g_t),    η_t: linear warm-up, then a cosine to 0

Nothing but the step number, the parameters and Adam's moments decides what comes next, so these
(with the curves so far) are what a checkpoint holds, and a run that was stopped repeats an
uninterrupted one exactly.

References:
    Kingma and Ba, 2014, "Adam: a method for stochastic optimization", arXiv 1412.6980.
    Vaswani et al., 2017, "Attention is all you need", arXiv 1706.03762, §5.3 (warm-up).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree

from experiments.compiling import Executables, all_at_once, compiler_options, shapes_of
from experiments.core import checkpoint, stop
from experiments.progress import Progress

Batch = Any  # a pytree of arrays whose shapes are one of a few
Observed = dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How long and how to train.

    Attributes:
        steps: optimiser steps in all.
        learning_rate: the highest one, reached at the end of the warm-up.
        warmup: steps over which the learning rate grows from 0.
        observe_every: steps between two looks at the held-out loss; start and end have one too.
        checkpoint_every: steps between two checkpoints.
        clip: the largest global norm of a gradient.
    """

    steps: int
    learning_rate: float = 3e-3
    warmup: int = 100
    observe_every: int = 50
    checkpoint_every: int = 100
    clip: float = 1.0

    def optimizer(self) -> optax.GradientTransformation:
        """Return clipping, then Adam with the schedule; eps and b2 as in Vaswani et al."""
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, self.learning_rate, min(self.warmup, self.steps), max(self.steps, self.warmup + 1)
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip), optax.adam(schedule, b1=0.9, b2=0.98, eps=1e-9)
        )


@dataclasses.dataclass
class History:
    """What training looked like, step by step; the first entry is step 1.

    Attributes:
        loss: training loss of each step.
        gradient_norm: global norm of each step's gradient, before clipping.
        seconds: time of each step, without compiling.
        observed: one dict for each look: ``step`` and whatever ``observe`` returned.
        compile_seconds: time spent compiling before the first step, over all sittings.
        temporaries: bytes of temporaries of the compiled step, by the batch's shapes.
        diverged_at: the step at which the loss, its gradient or an observation was not finite,
            where training ended; else None.
    """

    loss: list[float] = dataclasses.field(default_factory=list)
    gradient_norm: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    observed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    temporaries: dict[str, int] = dataclasses.field(default_factory=dict)
    diverged_at: int | None = None

    def observe(self, seen: Observed) -> None:
        """Add a look at the model; one that is not finite is a divergence."""
        self.observed.append({"step": self.step, **seen})
        if not all(value is None or math.isfinite(value) for value in seen.values()):
            self.diverged_at = self.step

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.loss)

    def step_milliseconds(self) -> float | None:
        """Return the median time of a step."""
        return float(np.median(self.seconds) * 1e3) if self.seconds else None


def train(
    model: nnx.Module,
    loss: Callable[[nnx.Module, Batch, jax.Array], jax.Array],
    batch_at: Callable[[int], Batch],
    recipe: Recipe,
    *,
    seed: int,
    observe: Callable[[nnx.Module], Observed],
    checkpoints: Path,
    progress: Progress,
    name: str,
    executables: Executables | None = None,
    ahead: Sequence[Batch] = (),
    besides: Sequence[Callable[[], Any]] = (),
) -> tuple[nnx.Module, History]:
    """Train ``model`` (or go on with it from the last of ``checkpoints``) and return it.

    Args:
        model: freshly built from ``seed``.
        loss: ``(model, batch, key) -> scalar``; the key is this step's, for dropout.
        batch_at: step (from 0) to batch; must depend on nothing but its argument.
        recipe: how long and how.
        seed: of the steps' keys.
        observe: called on the model at the start, every ``recipe.observe_every`` steps and at the
            end.
        checkpoints: folder for training states; made if missing.
        progress: where to show loss and time left.
        name: what the progress bar calls this model.
        executables: compiled steps to use and add to; share it among models of one loss and recipe.
        ahead: a batch of each shape to come; their steps are compiled before the first one.
        besides: other things to compile at the same time, so that no core is idle.

    Returns:
        The trained model and what training looked like. A loss, gradient or observation that is
        not finite ends training: ``history.diverged_at`` says at which step. A step whose loss or
        gradient is not finite changes nothing, so the model is the one before it.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came; the state was saved first.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    # One long vector: the optimiser is a handful of operations on it instead of as many on every
    # parameter, which would take most of the compiling time.
    flat, unravel = ravel_pytree(params)
    moments = recipe.optimizer().init(flat)
    base = jax.random.key(seed)
    leaves, structure = jax.tree.flatten(moments)
    restored = checkpoint.restore(
        checkpoints, {"parameters": flat, "moments": leaves}, progress.say
    )
    history = History()
    if restored is not None:
        flat, history = restored.state["parameters"], History(**restored.record)
        moments = jax.tree.unflatten(structure, restored.state["moments"])
    jitted = _step(graph, unravel, loss, recipe.optimizer())
    step = _CompiledStep(jitted, history, executables or Executables(), graph)
    begun = time.perf_counter()
    if history.step < recipe.steps and history.diverged_at is None:
        state = flat, moments, rest
        all_at_once([*(lambda b=b: step.prepare(*state, b, base) for b in ahead), *besides])
    history.compile_seconds += time.perf_counter() - begun
    if not history.observed:
        history.observe(observe(model))
    with progress.piece(name, recipe.steps, history.step) as piece, stop.held():
        while history.step < recipe.steps and history.diverged_at is None:
            key = jax.random.fold_in(base, history.step)
            flat, moments = step(flat, moments, rest, batch_at(history.step), key)
            now = history.step
            piece.advance(f"loss {history.loss[-1]:.3f}")
            ends = now == recipe.steps or history.diverged_at is not None
            if ends or now % recipe.observe_every == 0:
                history.observe(observe(nnx.merge(graph, unravel(flat), rest)))
                ends = ends or history.diverged_at is not None
            if ends or stop.asked() or now % recipe.checkpoint_every == 0:
                state = {"parameters": flat, "moments": jax.tree.leaves(moments)}
                checkpoint.save(checkpoints, now, state, dataclasses.asdict(history))
            if stop.asked():
                raise stop.Stopped
    if history.diverged_at is not None:
        progress.say(f"{name}: diverged, the loss is not finite at step {history.diverged_at}")
        progress.skip(recipe.steps - history.step)
    return nnx.merge(graph, unravel(flat), rest), history


def _step(graph: Any, unravel: Any, loss: Any, optimizer: optax.GradientTransformation) -> Any:
    """Return the jitted step; parameters and moments are donated, so it works in place."""

    def step(
        flat: jax.Array, moments: Any, rest: Any, batch: Batch, key: jax.Array
    ) -> tuple[Any, ...]:
        def objective(params: Any) -> jax.Array:
            return loss(nnx.merge(graph, params, rest), batch, key)

        value, gradient = jax.value_and_grad(objective)(unravel(flat))
        gradient, _ = ravel_pytree(gradient)
        norm = jnp.linalg.norm(gradient)
        updates, new_moments = optimizer.update(gradient, moments, flat)
        # A step whose loss or gradient is not finite changes nothing: the model before it is the
        # one that can be examined.
        fine = jnp.isfinite(value) & jnp.isfinite(norm)
        new = optax.apply_updates(flat, updates), new_moments
        kept = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, (flat, moments))
        return *kept, value, norm

    return jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options())


class _CompiledStep:
    """Runs the step and keeps the history: one executable for each shape of batch."""

    def __init__(self, step: Any, history: History, executables: Executables, structure: Any):
        self._step = step
        self._history = history
        self._executables = executables
        self._structure = structure

    def prepare(self, *arguments: Any) -> Any:
        """Return the executable for these arguments and note what memory it needs."""
        executable = self._executables.get(("step", self._structure), lambda: self._step, arguments)
        shapes = shapes_of(arguments[3])
        if shapes not in self._history.temporaries:
            analysis = executable.memory_analysis()
            if analysis is not None:
                self._history.temporaries[shapes] = analysis.temp_size_in_bytes
        return executable

    def __call__(
        self, flat: jax.Array, moments: Any, rest: Any, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Any]:
        history = self._history
        executable = self.prepare(flat, moments, rest, batch, key)
        begun = time.perf_counter()
        flat, moments, loss, norm = executable(flat, moments, rest, batch, key)
        loss, norm = float(loss), float(norm)
        history.seconds.append(time.perf_counter() - begun)
        history.loss.append(loss)
        history.gradient_norm.append(norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            history.diverged_at = history.step
        return flat, moments
