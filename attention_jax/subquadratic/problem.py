"""A call, brought into the one shape that every method here works on, and back.

What is hidden must not matter and what is seen must stay loud, NaN above all. So queries, keys and
values that are not finite are replaced before any arithmetic, and the rows that see one of them are
made NaN afterwards: no product, forward or backward, ever meets a NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import check_inputs
from attention_jax._core.manual import vary_as
from attention_jax._core.numerics import stats_dtype
from attention_jax.softmax import log_sum_exp
from attention_jax.subquadratic.visibility import Visibility, visibility

# A position that no query reaches.
NEVER = np.int32(2**31 - 1)


class Problem(NamedTuple):
    """One call; batch axes joined into one, B, and heads in front of lengths.

    Attributes:
        query: `[B, N, T, H]`, finite, in float32 at least; and so are key and value.
        key: `[B, K, S, H]`.
        value: `[B, K, S, V]`, 0 where the key is hidden.
        seen: bool `[B, 1 or K, S]`, which keys may be seen; None is all.
        asks: bool `[B, 1 or N, T]`, which queries may see; None is all.
        reach: int32 `[T]`: query t sees keys up to this index.
        bad_query: bool `[B, N, T]`, queries that were not finite.
        bad_key: bool `[B, K, S]`, seen keys that were not finite.
        bad_value: bool `[B, K, S, V]`, seen values that were not finite.
        layout: the sizes as they were given; K may have become N (see `see.key`).
        see: the mask, taken apart.
        dtype: of the output.
    """

    query: Array
    key: Array
    value: Array
    seen: Array | None
    asks: Array | None
    reach: Array
    bad_query: Array
    bad_key: Array
    bad_value: Array
    layout: Layout
    see: Visibility
    dtype: Any

    @property
    def kv_heads(self) -> int:
        """K; N where the mask tells query heads apart."""
        return self.key.shape[1]

    @property
    def grouped(self) -> Array:
        """The queries, `[B, K, G, T, H]`."""
        return group(self.query, self.kv_heads)

    @property
    def usable(self) -> Array:
        """Queries that may stand for others in a summary, bool `[B, N, T]`.

        A query that is not finite or may see nothing does not. Where T = S it is taken for the
        query of the same token, and one whose key is hidden as padding stands for nobody either.
        """
        usable = ~self.bad_query
        if self.asks is not None:
            usable = usable & self.asks
        if self.seen is not None and self.layout.T == self.layout.S:
            usable = usable & over_groups(self.seen, self.layout.N)
        return usable


def canonical(name: str, query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """Checks the arguments of the public function `name`, and brings them into one shape.

    Raises:
        TypeError: a wrong kind of argument.
        ValueError: sizes that do not fit, or a mask that the method cannot honour.
    """
    problem = as_given(name, query, key, value, mask)
    good = usable_keys(problem)[..., None]
    value = jnp.where(problem.bad_value, 0, problem.value)
    if problem.seen is not None:
        value = jnp.where(problem.seen[..., None], value, 0)
    return problem._replace(
        query=jnp.where(problem.bad_query[..., None], 1, problem.query),
        key=jnp.where(good, problem.key, 1),
        value=value,
    )


def as_given(name: str, query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """`canonical` without the cleaning: what is hidden or not finite is still in the arrays.

    For a method that walks along the sequence and can clean each part as it comes, which saves a
    copy of everything.
    """
    layout = check_inputs(query, key, value)
    if layout.H != layout.Hk:
        raise ValueError(f"query depth {layout.H} and key depth {layout.Hk} must match (H)")
    see = visibility(name, mask, layout)
    dtype = stats_dtype(query.dtype, key.dtype, value.dtype)

    def heads_first(x: Any) -> Array:
        x = jnp.swapaxes(jnp.asarray(x).astype(dtype), -2, -3)
        return x.reshape(int(np.prod(layout.batch)), *x.shape[-3:])

    queries, keys, values = heads_first(query), heads_first(key), heads_first(value)
    if see.key is not None and see.key.shape[1] > 1 and layout.group > 1:
        # The mask tells the heads of a group apart, so they can no longer share their keys.
        keys, values = (jnp.repeat(x, layout.group, axis=1) for x in (keys, values))
    bad_query, bad_key = (~jnp.all(jnp.isfinite(x), axis=-1) for x in (queries, keys))
    bad_value = ~jnp.isfinite(values)
    if see.key is not None:
        bad_key, bad_value = bad_key & see.key, bad_value & see.key[..., None]
    reach = np.full(layout.T, layout.S, np.int32)
    if see.offset is not None:
        reach = np.arange(layout.T, dtype=np.int32) + np.int32(see.offset)
    return Problem(
        queries,
        keys,
        values,
        see.key,
        see.query,
        jnp.asarray(reach),
        bad_query,
        bad_key,
        bad_value,
        layout,
        see,
        np.dtype(query.dtype),
    )


def usable_keys(problem: Problem) -> Array:
    """Keys that are seen and finite, bool `[B, K, S]`."""
    return ~problem.bad_key if problem.seen is None else ~problem.bad_key & problem.seen


def group(x: Array, kv_heads: int) -> Array:
    """`[B, N, ...]` as `[B, K, G, ...]`."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def over_groups(x: Array, num_heads: int) -> Array:
    """`[B, 1 or K, ...]` as `[B, 1 or N, ...]`, each head as often as its group is large."""
    return x if x.shape[1] == 1 else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def spoiled_rows(problem: Problem, since: Any = None) -> Array:
    """Which outputs see a key or a value that is not finite, bool `[B, N, T, V]`.

    Args:
        problem: the call.
        since: int32 `[B, 1 or K, S]`, the least reach that sees each key; by default its index.
    """
    if since is None:
        since = jnp.arange(problem.layout.S, dtype=jnp.int32)[None, None]
    bad = problem.bad_value | problem.bad_key[..., None]

    def some() -> Array:
        first = jnp.min(jnp.where(bad, since[..., None], NEVER), axis=2, initial=NEVER)
        rows = first[:, :, None, :] <= problem.reach[None, None, :, None]
        return rows & (first < NEVER)[:, :, None, :]

    def none() -> Array:
        shape = (*bad.shape[:2], problem.layout.T, bad.shape[3])
        return vary_as(jnp.zeros(shape, bool), (bad, since, problem.reach))

    # Seldom is anything bad, and asking is a tenth of finding out where.
    return over_groups(jax.lax.cond(jnp.any(bad), some, none), problem.layout.N)


def finish(problem: Problem, out: Array, spoiled: Array, sees: Array) -> Array:
    """From `[B, N, T, V]` to the public layout.

    Args:
        problem: the call.
        out: `[B, N, T, V]`.
        spoiled: bool `[B, N, T, V]`, what must be NaN.
        sees: bool `[B, 1 or N, T]`, the queries that see something; others get 0.
    """
    layout = problem.layout
    if problem.asks is not None:
        sees = sees & problem.asks
    out = jnp.where(spoiled | problem.bad_query[..., None], jnp.nan, out)
    out = jnp.where(sees[..., None], out, 0)
    out = out.reshape(*layout.batch, layout.N, layout.T, layout.V)
    return jnp.swapaxes(out, -2, -3).astype(problem.dtype)


def nothing(problem: Problem) -> Array | None:
    """The output where there is no pair at all, or None where there is one."""
    layout = problem.layout
    if 0 not in (*layout.batch, layout.T, layout.S, layout.N):
        return None
    return jnp.zeros((*layout.batch, layout.T, layout.N, layout.V), problem.dtype)


class Weighed(NamedTuple):
    """What a short list of keys gives.

    Attributes:
        out: `[..., t, V]`.
        lse: `[..., t]`, the log-sum-exp of the logits; -inf where nothing is visible.
        loud: bool `[..., t, V]`, outputs that see a value or key that is not finite.
    """

    out: Array
    lse: Array
    loud: Array


def weigh(logits: Array, visible: Array, value: Array, bad: Array, spoil: Array) -> Weighed:
    """Softmax over a short list of keys, and the values by it.

    Args:
        logits: `[..., t, s]`.
        visible: bool, broadcastable to `[..., t, s]`.
        value: `[..., s, V]`.
        bad: bool `[..., s, V]`, values that stand for one that is not finite.
        spoil: bool scalar, whether there is any of them.
    """
    visible = jnp.broadcast_to(visible, logits.shape)
    lse, weights = log_sum_exp(logits, visible)
    out = jnp.matmul(weights, value)

    def loud() -> Array:
        return jnp.matmul(visible.astype(out.dtype), bad.astype(out.dtype)) > 0

    def quiet() -> Array:
        return vary_as(jnp.zeros(out.shape, bool), (out, visible, bad))

    return Weighed(out, lse, jax.lax.cond(spoil, loud, quiet))
