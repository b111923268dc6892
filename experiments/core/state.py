"""The state of a training and one step of it.

    ℓ = loss(model(θ_t, rest_t); batch t, key t),   g = ∇_θ ℓ
    (θ, moments)_{t+1} = optimiser(g),   rest_{t+1}: as the model left it

The graph of the model is static; everything else is a pytree of arrays with dtypes and shardings. A
step whose loss or gradient is not finite changes nothing, nor do the later steps: the model is that
before it. With float16 the loss overflows occasionally by design: then only that step is skipped,
unless the scale of the loss is at its minimum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.core.compiling import compiler_options, executable, shapes_of
from experiments.core.optim import Recipe, next_scale

Batch = Any  # a pytree of arrays whose shapes are one of a few
Loss = Callable[[Any, Batch, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The training state, which with the batches determines all later steps.

    Attributes:
        params: the parameters.
        rest: the model's other variables.
        optimizer: moments, rates and their step count.
        step: steps done; with ``seed`` it gives the key of the next one.
        seed: of the keys.
        alive: whether everything was finite so far.
        scale: of the loss in float16, else None.
    """

    params: Any
    rest: Any
    optimizer: Any
    step: jax.Array
    seed: jax.Array
    alive: jax.Array
    scale: Any


def begin(model: nnx.Module, recipe: Recipe, seed: int) -> tuple[Any, State]:
    """Return the graph of a fresh model and the state before the first step."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    moments = recipe.optimizer().init(params)
    numbers = jnp.int32(0), jnp.int32(seed), jnp.bool_(True)
    return graph, State(params, rest, moments, *numbers, recipe.loss_scale())


def merged(graph: Any, state: State) -> Any:
    """Return the model with the variables of a state."""
    return nnx.merge(graph, state.params, state.rest, copy=True)


def _step(
    graph: Any, loss: Loss, recipe: Recipe, state: State, batch: Batch
) -> tuple[State, dict[str, jax.Array]]:
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    factor = jnp.float32(1) if state.scale is None else state.scale["scale"]

    def objective(params: Any) -> tuple[jax.Array, Any]:
        model = nnx.merge(graph, recipe.cast(params), state.rest, copy=True)
        value = loss(model, recipe.cast(batch), key).astype(jnp.float32)
        return value * factor, (value, nnx.split(model, nnx.Param, ...)[2])

    (_, (value, rest)), gradient = jax.value_and_grad(objective, has_aux=True)(state.params)
    if state.scale is not None:
        gradient = jax.tree.map(lambda g: g / factor, gradient)
    norm = optax.tree.norm(gradient)
    updates, moments = recipe.optimizer().update(gradient, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    alive, scale = state.alive & finite, state.scale
    if scale is not None:
        alive, scale = state.alive & (finite | (factor > 1)), next_scale(scale, finite)

    def kept(new: Any, old: Any) -> Any:
        new = new if new.dtype == old.dtype else new.astype(old.dtype)
        return jnp.where(alive & finite, new, old)

    before = state.params, state.rest, state.optimizer
    after = jax.tree.map(kept, (params, rest, moments), before)
    params, rest, moments = after
    done = State(params, rest, moments, state.step + alive, state.seed, alive, scale)
    return done, {"loss": value, "gradient_norm": norm, "alive": alive}


class Step:
    """The compiled step of a model, by the shapes of its batches; it works in place."""

    def __init__(self, graph: Any, loss: Loss, recipe: Recipe, shardings: Any):
        self._key = "step", graph, loss, recipe.compiled_part()
        self._given, self._shardings = (graph, loss, recipe), shardings
        self._known: dict[str, Any] = {}

    def executable(self, state: State, batch: Batch) -> Any:
        """Return the executable for batches of this shape."""
        shapes = shapes_of(batch)
        if shapes not in self._known:
            self._known[shapes] = executable(self._key, self._jitted, (state, batch))
        return self._known[shapes]

    def _jitted(self) -> Any:
        def step(state: State, batch: Batch) -> Any:
            return _step(*self._given, state, batch)

        options = compiler_options()
        out = self._shardings, None
        return jax.jit(step, donate_argnums=0, out_shardings=out, compiler_options=options)

    def __call__(self, state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        """Return the next state, and the step's metrics."""
        return self.executable(state, batch)(state, batch)
