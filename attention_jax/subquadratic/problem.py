"""Conversion of a call to the canonical layout of all families, and back.

Masked values must not affect the result, and visible non-finite ones must give NaN. Non-finite
queries, keys and values are therefore replaced before any arithmetic, and the rows that attend to
one of them are set to NaN afterwards: no product, forward or backward, contains a NaN.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import check_inputs, check_known
from attention_jax._core.mesh_axes import vary_as
from attention_jax._core.numerics import stats_dtype
from attention_jax.softmax import log_sum_exp
from attention_jax.subquadratic.visibility import Visibility, visibility

# An index beyond the last visible key of every query.
NEVER = np.int32(2**31 - 1)


class Problem(NamedTuple):
    """One call: batch axes merged into one, B, and heads before lengths.

    Attributes:
        query: `[B, N, T, H]`, finite, float32 at least, like key and value.
        key: `[B, K, S, H]`.
        value: `[B, K, S, V]`, 0 for masked keys.
        key_mask: bool `[B, 1 or K, S]`, the mask of keys; None is all.
        query_mask: bool `[B, 1 or N, T]`, the mask of queries; None is all.
        reach: int32 `[T]`, the index of each query's last visible key.
        bad_query: bool `[B, N, T]`, non-finite queries.
        bad_key: bool `[B, K, S]`, unmasked non-finite keys.
        bad_value: bool `[B, K, S, V]`, unmasked non-finite values.
        layout: the sizes of the arguments; `key.shape[1]` may be N instead of K.
        mask: the decomposed mask.
        dtype: dtype of the output.
    """

    query: Array
    key: Array
    value: Array
    key_mask: Array | None
    query_mask: Array | None
    reach: Array
    bad_query: Array
    bad_key: Array
    bad_value: Array
    layout: Layout
    mask: Visibility
    dtype: Any

    @property
    def kv_heads(self) -> int:
        """K, or N if the mask differs between the query heads of a group."""
        return self.key.shape[1]

    @property
    def grouped(self) -> Array:
        """The queries, `[B, K, G, T, H]`."""
        return group(self.query, self.kv_heads)

    @property
    def usable(self) -> Array:
        """Queries that enter summaries such as landmarks and means, bool `[B, N, T]`.

        Non-finite and masked queries are excluded. If T = S, query t and key t are the same token,
        and queries of masked keys are excluded as padding.
        """
        usable = ~self.bad_query
        if self.query_mask is not None:
            usable = usable & self.query_mask
        if self.key_mask is not None and self.layout.T == self.layout.S:
            usable = usable & over_groups(self.key_mask, self.layout.N)
        return usable


def canonical(name: str, query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """Checks the arguments of the public function `name`, and converts them to a `Problem`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, or an unsupported mask.
    """
    problem = as_given(name, query, key, value, mask)
    good = usable_keys(problem)[..., None]
    value = jnp.where(problem.bad_value, 0, problem.value)
    if problem.key_mask is not None:
        value = jnp.where(problem.key_mask[..., None], value, 0)
    return problem._replace(
        query=jnp.where(problem.bad_query[..., None], 1, problem.query),
        key=jnp.where(good, problem.key, 1),
        value=value,
    )


def as_given(name: str, query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """`canonical` without replacing masked and non-finite entries.

    For methods that scan over the sequence and replace them part by part, which saves a copy of all
    arrays.
    """
    layout = check_inputs(query, key, value)
    check_known(name, T=layout.T, S=layout.S)
    if layout.H != layout.Hk:
        raise ValueError(f"query depth {layout.H} and key depth {layout.Hk} must match (H)")
    see = visibility(name, mask, layout)
    dtype = stats_dtype(query.dtype, key.dtype, value.dtype)

    def heads_first(x: Any) -> Array:
        x = jnp.swapaxes(jnp.asarray(x).astype(dtype), -2, -3)
        return x.reshape(math.prod(layout.batch), *x.shape[-3:])

    queries, keys, values = heads_first(query), heads_first(key), heads_first(value)
    if see.key is not None and see.key.shape[1] > 1 and layout.group > 1:
        # The mask differs between the heads of a group, so they cannot share keys.
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
    """Keys that are unmasked and finite, bool `[B, K, S]`."""
    return ~problem.bad_key if problem.key_mask is None else ~problem.bad_key & problem.key_mask


def group(x: Array, kv_heads: int) -> Array:
    """`[B, N, ...]` as `[B, K, G, ...]`."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def over_groups(x: Array, num_heads: int) -> Array:
    """`[B, 1 or K, ...]` as `[B, 1 or N, ...]`, each head repeated N // K times."""
    return x if x.shape[1] == 1 else jnp.repeat(x, num_heads // x.shape[1], axis=1)


def non_finite_rows(problem: Problem, since: Any = None) -> Array:
    """Outputs for which a non-finite key or value is visible, bool `[B, N, T, V]`.

    Args:
        problem: the call.
        since: int32 `[B, 1 or K, S]`, the smallest reach that includes each key; by default its
            index.
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

    # Non-finite inputs are rare, and testing for any costs a tenth of locating them.
    return over_groups(jax.lax.cond(jnp.any(bad), some, none), problem.layout.N)


def finish(problem: Problem, out: Array, non_finite: Array, nonempty: Array) -> Array:
    """Sets NaN and empty rows, and converts `[B, N, T, V]` to the public layout.

    Args:
        problem: the call.
        out: `[B, N, T, V]`.
        non_finite: bool `[B, N, T, V]`, outputs set to NaN.
        nonempty: bool `[B, 1 or N, T]`, non-empty rows; other rows are 0.
    """
    layout = problem.layout
    if problem.query_mask is not None:
        nonempty = nonempty & problem.query_mask
    out = jnp.where(non_finite | problem.bad_query[..., None], jnp.nan, out)
    out = jnp.where(nonempty[..., None], out, 0)
    out = out.reshape(*layout.batch, layout.N, layout.T, layout.V)
    return jnp.swapaxes(out, -2, -3).astype(problem.dtype)


def empty_output(problem: Problem) -> Array | None:
    """The output if a size is 0, otherwise None."""
    layout = problem.layout
    if 0 not in (*layout.batch, layout.T, layout.S, layout.N):
        return None
    return jnp.zeros((*layout.batch, layout.T, layout.N, layout.V), problem.dtype)


class Weighed(NamedTuple):
    """The result of attention to a short list of keys.

    Attributes:
        out: `[..., t, V]`.
        lse: `[..., t]`, the log-sum-exp of the logits; -inf for empty rows.
        non_finite: bool `[..., t, V]`, outputs for which a non-finite key or value is visible.
    """

    out: Array
    lse: Array
    non_finite: Array


def weigh(logits: Array, visible: Array, value: Array, bad: Array, any_bad: Array) -> Weighed:
    """Softmax attention to a short list of keys.

    Args:
        logits: `[..., t, s]`.
        visible: bool, broadcastable to `[..., t, s]`.
        value: `[..., s, V]`.
        bad: bool `[..., s, V]`, entries that replace a non-finite key or value.
        any_bad: bool scalar, whether there are any.
    """
    visible = jnp.broadcast_to(visible, logits.shape)
    lse, weights = log_sum_exp(logits, visible)
    out = jnp.matmul(weights, value)

    def non_finite() -> Array:
        return jnp.matmul(visible.astype(out.dtype), bad.astype(out.dtype)) > 0

    def none() -> Array:
        return vary_as(jnp.zeros(out.shape, bool), (out, visible, bad))

    return Weighed(out, lse, jax.lax.cond(any_bad, non_finite, none))
