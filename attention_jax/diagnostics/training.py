"""Looking on while a model trains: statistics that train along, and a monitor beside the optimiser.

output, stats = attention_stats(model, inputs)      inside the loss, differentiable
optimizer = optax.chain(monitor(paths), optax.adam(1e-3))
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import NEG_INF
from attention_jax._core.record import static
from attention_jax.diagnostics import flavours
from attention_jax.kernels.request import Request, Result
from attention_jax.softmax import Stats

if TYPE_CHECKING:
    import optax

FIELDS = ("entropy", "least_entropy", "largest_weight", "max_logit", "gradient_norm", "bad")


def attention_stats(
    model: Any, *inputs: Any, variables: Any = None, method: str | None = None, **options: Any
) -> tuple[Any, dict[str, Stats]]:
    """A model's output, and lse, entropy and largest logit of every attention in it.

    To be called inside a loss: the statistics are differentiable, and cost one accumulator each in
    the kernels that run anyway. Nothing is compiled here; the caller's own `jit` does that. What
    the model's modules write in the call is dropped.

    Args:
        model: as in `capture`, and so are the others.
        *inputs: as in `capture`.
        variables: as in `capture`.
        method: as in `capture`.
        **options: as in `capture`.

    Returns:
        The output, and `Stats` with rows `[*B, N, T]` by the attention's path, in the order of
        running.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoder
        >>> model = TransformerEncoder(1, 2, 8, 16, rngs=nnx.Rngs(0))
        >>> out, stats = aj.diagnostics.attention_stats(model, jnp.ones((3, 5, 8)))
        >>> {path: row.entropy.shape for path, row in stats.items()}
        {'layers/0/self_attention': (3, 2, 5)}
    """

    def look(request: Request, run: Any, implementation: Any, kind: str) -> tuple[Result, Any]:
        result = run(dataclasses.replace(request, statistics=True))
        return result, result.stats

    parts = flavours.take_apart(model, variables)
    output, found = flavours.run(parts, flavours.Watch(look), method, inputs, options)
    return output, {name: x.kept for name, x in found.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MonitorState:
    """What a monitor has seen: the last steps, in a ring.

    Attributes:
        step: how many updates there were.
        steps: the step of each row `[capacity]`, -1 where there is none yet.
        values: `[capacity, paths, FIELDS]`.
        losses: `[capacity, 2]`, the loss and whether one was given.
        paths: the attentions.
    """

    step: Any
    steps: Any
    values: Any
    losses: Any
    paths: tuple[str, ...] = static()


def history(state: Any) -> list[dict[str, Any]]:
    """The rows that a monitor has kept, oldest first.

    Args:
        state: the monitor's state, or an optimiser's state with one in it.

    Returns:
        For each step `{"step": int, "attention": {path: {field: float}}}`, and "loss" where one
        was given. The fields are the mean entropy over rows, that of the head where it is least,
        the mean largest weight, the largest logit, the norm of the gradient, and how many
        log-sum-exps and gradients are not finite.

    Raises:
        ValueError: there is no monitor's state in it, or more than one.
    """
    kept = _find(state)
    steps = np.asarray(kept.steps)
    values, losses = np.asarray(kept.values, np.float64), np.asarray(kept.losses, np.float64)
    rows = []
    for at in np.argsort(steps, kind="stable"):
        if steps[at] >= 0:
            named = [dict(zip(FIELDS, row.tolist(), strict=True)) for row in values[at]]
            attention = dict(zip(kept.paths, named, strict=True))
            row = {"step": int(steps[at]), "attention": attention}
            loss, given = losses[at]
            rows.append({**row, "loss": float(loss)} if given else row)
    return rows


def monitor(
    paths: Sequence[str] | Mapping[str, Any], *, capacity: int = 1024, every: int = 1
) -> "optax.GradientTransformationExtraArgs":
    """An observer in the optimiser's chain: entropy, logits and gradient norms over the steps.

    It changes no gradient, works under jit, and keeps the last `capacity` rows in its state, from
    where a writer takes them.

    Args:
        paths: the attentions to watch, as `attention_stats` names them; its result will do.
        capacity: how many rows are kept; an older one makes room for a newer.
        every: only each so-manieth step leaves a row.

    Returns:
        An optax transformation: `update(gradients, state, params, stats=stats)` takes what
        `attention_stats` returned, and `loss=` too. `history` reads its state.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import attention_jax as aj
        >>> from attention_jax.diagnostics import history, monitor
        >>> optimizer = optax.chain(monitor(["layer"]), optax.sgd(0.1))
        >>> gradient = {"layer": {"query": jnp.array([3.0, 4.0])}}
        >>> state = optimizer.init(gradient)
        >>> rows = jnp.ones((1, 2, 5))  # lse, entropy and largest logit, from attention_stats
        >>> stats = {"layer": aj.Stats(rows, rows, rows)}
        >>> _, state = optimizer.update(gradient, state, stats=stats)
        >>> [(row["step"], row["attention"]["layer"]["gradient_norm"]) for row in history(state)]
        [(0, 5.0)]
    """
    import optax

    names = tuple(paths)
    check_count("capacity", capacity, 1)
    check_count("every", every, 1)
    if not names:
        raise ValueError("monitor needs the path of at least one attention")

    def init(params: Any) -> MonitorState:
        del params
        return MonitorState(
            jnp.zeros((), jnp.int32),
            jnp.full((capacity,), -1, jnp.int32),
            jnp.zeros((capacity, len(names), len(FIELDS)), jnp.float32),
            jnp.zeros((capacity, 2), jnp.float32),
            names,
        )

    def update(
        updates: Any,
        state: MonitorState,
        params: Any = None,
        *,
        stats: Any,
        loss: Any = None,
        **extra: Any,
    ) -> tuple[Any, MonitorState]:
        del params, extra
        missing = [name for name in names if name not in stats]
        if missing:
            raise ValueError(f"stats has no {missing[0]!r}: it has {', '.join(stats)}")
        flat = jax.tree_util.tree_flatten_with_path(updates)[0]
        gradients = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}
        row = jnp.stack([_fields(stats[name], _below(gradients, name, names)) for name in names])
        value = jnp.asarray(0 if loss is None else loss).astype(jnp.float32)
        value = jnp.stack([value, jnp.full_like(value, loss is not None)])
        at, due = (state.step // every) % capacity, state.step % every == 0

        def put(old: Array, new: Array) -> Array:
            return jnp.where(due, old.at[at].set(new), old)

        return updates, MonitorState(
            state.step + 1,
            put(state.steps, state.step),
            put(state.values, row),
            put(state.losses, value),
            names,
        )

    made: Any = optax.GradientTransformationExtraArgs  # whose types know no extra arguments
    return made(init, update)


def _below(gradients: Mapping[str, Array], path: str, paths: tuple[str, ...]) -> list[Array]:
    start = f"{path.split('#')[0]}/"
    found = [x for name, x in gradients.items() if name.startswith(start)]
    if not found and len(paths) == 1:  # a model that is itself the attention
        found = list(gradients.values())
    if not found:
        raise ValueError(f"no gradient belongs to {path!r}: they are {', '.join(gradients)}")
    return found


def _fields(stats: Stats, gradients: list[Array]) -> Array:
    lse, entropy, top = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in stats)
    seen = lse != NEG_INF
    axes = tuple(i for i in range(lse.ndim) if i != lse.ndim - 2)

    def mean(x: Array, axes: Any = None) -> Array:
        count = jnp.sum(seen, axis=axes, dtype=jnp.float32)
        return jnp.sum(jnp.where(seen, x, 0), axis=axes) / jnp.maximum(count, 1)

    largest = jnp.exp(jnp.where(seen, top - jnp.where(seen, lse, 0), NEG_INF))
    square = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in gradients), jnp.float32(0))
    bad = jnp.sum(jnp.isnan(lse) | (lse == jnp.inf))
    for gradient in gradients:
        bad = bad + jnp.sum(~jnp.isfinite(gradient))
    top = jnp.max(jnp.where(seen, top, NEG_INF), initial=NEG_INF)
    values = [
        mean(entropy),
        jnp.min(mean(entropy, axes), initial=jnp.inf),
        mean(largest),
        jnp.where(top == NEG_INF, 0, top),
        jnp.sqrt(square),
        bad.astype(jnp.float32),
    ]
    return jnp.stack(values)


def _find(state: Any) -> MonitorState:
    found = [
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MonitorState))
        if isinstance(x, MonitorState)
    ]
    if len(found) != 1:
        raise ValueError(f"the state holds {len(found)} states of a monitor, and must hold one")
    return jax.tree.map(_plain, found[0], is_leaf=lambda x: hasattr(x, "get_value"))


def _plain(x: Any) -> Any:
    return x.get_value() if hasattr(x, "get_value") else x
