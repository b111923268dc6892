"""Monitors attention during training: an optax transformation that keeps statistics of past steps.

optimizer = optax.chain(monitor(paths), optax.adam(1e-3))
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import NEG_INF, lowest
from attention_jax._core.pytrees import Record, pytree, static
from attention_jax.diagnostics.application import flatten_by_path
from attention_jax.softmax import Stats

if TYPE_CHECKING:
    import optax

FIELDS = ("entropy", "least_entropy", "largest_weight", "max_logit", "gradient_norm", "bad")


@pytree
class MonitorState(Record):
    """The state of a monitor: a ring buffer of the last rows.

    Attributes:
        step: number of updates.
        steps: the step of each row `[capacity]`, -1 for an unused row.
        values: `[capacity, paths, FIELDS]`.
        losses: `[capacity, 2]`, the loss and whether one was given.
        paths: paths of the attentions.
    """

    step: Any
    steps: Any
    values: Any
    losses: Any
    paths: tuple[str, ...] = static()


def history(state: Any) -> list[dict[str, Any]]:
    """The rows of a monitor, oldest first.

    Args:
        state: the state of a monitor, or an optimiser state that contains one.

    Returns:
        For each row `{"step": int, "attention": {path: {field: float}}}`, and "loss" if one was
        given. The fields are the mean entropy over rows, the smallest mean entropy of a head, the
        mean largest weight, the largest logit, the gradient norm, and the number of log-sum-exps
        and gradient entries that are not finite.

    Raises:
        ValueError: the state contains no monitor, or more than one.
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
    """An optax transformation that keeps entropy, logits and gradient norms of past steps.

    Gradients pass through unchanged. The last `capacity` rows are part of the state; `JsonLines`
    and `TensorBoard` write them.

    Args:
        paths: paths of attentions, as in `attention_stats`; its result is accepted too.
        capacity: the number of rows to keep; the oldest is overwritten.
        every: the number of steps between rows.

    Returns:
        An optax transformation; `update(gradients, state, params, stats=stats, loss=loss)` takes
        the statistics of `attention_stats` and, optionally, the loss. `history` reads its state.

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
        raise ValueError("paths must name at least one attention")

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
        gradients = flatten_by_path(updates)
        row = jnp.stack(
            [_fields(stats[name], _gradients_of(gradients, name, names)) for name in names]
        )
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

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _gradients_of(gradients: Mapping[str, Array], path: str, paths: tuple[str, ...]) -> list[Array]:
    start = f"{path.split('#')[0]}/"
    found = [x for name, x in gradients.items() if name.startswith(start)]
    if not found and len(paths) == 1:  # the model is itself the attention
        found = list(gradients.values())
    if not found:
        raise ValueError(f"no gradient belongs to {path!r}; gradients are {', '.join(gradients)}")
    return found


def _fields(stats: Stats, gradients: list[Array]) -> Array:
    lse, entropy, top = (jax.lax.stop_gradient(x).astype(jnp.float32) for x in stats)
    visible = lse != NEG_INF
    axes = tuple(i for i in range(lse.ndim) if i != lse.ndim - 2)

    def mean(x: Array, axes: Any = None) -> Array:
        count = jnp.sum(visible, axis=axes, dtype=jnp.float32)
        return jnp.sum(jnp.where(visible, x, 0), axis=axes) / jnp.maximum(count, 1)

    lse, top = jnp.where(visible, lse, 0), jnp.where(visible, top, 0)
    largest = jnp.where(visible, jnp.exp(top - lse), 0)
    square = sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in gradients), jnp.float32(0))
    bad = jnp.sum(jnp.isnan(lse) | (lse == jnp.inf))
    bad = bad + sum(jnp.sum(~jnp.isfinite(x)) for x in gradients)
    by_head, none = mean(entropy, axes), lowest(jnp.float32)
    values = [
        mean(entropy),
        jnp.min(by_head) if by_head.size else jnp.float32(jnp.inf),
        mean(largest),
        jnp.where(jnp.any(visible), jnp.max(top, where=visible, initial=none), 0),
        jnp.sqrt(square),
        bad.astype(jnp.float32),
    ]
    return jnp.stack(values)


def _find(state: Any) -> MonitorState:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MonitorState))
    found = [x for x in leaves if isinstance(x, MonitorState)]
    if len(found) != 1:
        raise ValueError(f"the state holds {len(found)} states of a monitor, and must hold one")

    def unwrap(x: Any) -> Any:  # nnx.Optimizer keeps variables
        return x.get_value() if hasattr(x, "get_value") else x

    return jax.tree.map(unwrap, found[0], is_leaf=lambda x: hasattr(x, "get_value"))
