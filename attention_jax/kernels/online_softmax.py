"""The online softmax: rows of logits, one block of keys after another.

    top' = max(top, max_s x_s)
    total' = total · exp(top - top') + Σ_s exp(x_s - top')
    out' = out · exp(top - top') + Σ_s exp(x_s - top') · v_s

References:
    Milakov, Gimelshein 2018, arXiv:1805.02867, algorithm 3.
    Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithm 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.mesh_axes import is_explicit
from attention_jax._core.numerics import NEG_INF, lowest, precision_of_products, widen_low
from attention_jax._core.term import Sides
from attention_jax.kernels.block import (
    block_logits,
    cut,
    first_at,
    narrow,
    raw_logits,
    weigh_values,
)
from attention_jax.kernels.block_loops import block_start, scan_rows
from attention_jax.kernels.per_head import lower_heads
from attention_jax.kernels.problem import Problem, Static, finish
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling


class Online(NamedTuple):
    """The running state of `[Tb]` rows.

    Attributes:
        top: the running maximum; the least finite number before any visible key.
        total: `Σ exp(x - top)`.
        out: `Σ exp(x - top) · v`, `[Tb, V]`.
        moment: `Σ exp(x - top) · (x - top)`, for the entropy.
        first: index of the first key that attains `top`, -1 before any visible key.
    """

    top: Array
    total: Array
    out: Array
    moment: Array
    first: Array


class Rows(NamedTuple):
    """Finished rows: out `[Tb, V]`, entropy and the index of the largest logit `[Tb]`.

    `top` and `log_total` are the two summands of lse: if a row's logits are of the order of 1e9, as
    under a low but finite bias, the second is below the rounding of their sum. All are finite, also
    for an empty row, so that the residuals of the derivative are. With statistics, `first` of an
    empty row is -1.
    """

    out: Array
    entropy: Array
    first: Array
    top: Array
    log_total: Array


def attend_heads(request: Request, tiling: Tiling, attend_head: Callable[..., Rows]) -> Result:
    """Computes a request head by head, or vectorised over heads.

    Args:
        request: the request.
        tiling: its tiling.
        attend_head: `attend_head(head, kinds, dtypes, facts, block)`, as the function below.
    """
    with precision_of_products(request.precision):
        heads = lower_heads(request, tiling, merge=tiling.loop)
        dtypes, facts = heads.dtypes, heads.facts

        def one(kinds: Any, head: Problem) -> tuple[Array, ...]:
            rows = attend_head(head, kinds, dtypes, facts, tiling.block)
            return rows.out, *(statistics_of(head, dtypes, rows) if facts.statistics else ())

        return finish(request, facts, *heads.map(one))


def attend_head(
    head: Problem,
    kinds: Any,
    dtypes: Problem,
    facts: Static,
    block: tuple[int, int],
    *,
    split: bool = False,
) -> Rows:
    """The rows of one head of one example.

    Args:
        head: the problem without leading axes.
        kinds: int8 `[nT, nS]`, the kinds of blocks.
        dtypes: the dtypes of its leaves, to which blocks are cast.
        facts: its static facts.
        block: (query, key) size of a block.
        split: see `scan_rows`.
    """
    layout = facts.layout

    def begin(i: Array) -> Online:
        return start(block[0], layout.V, facts.accumulator)

    def fetch(i: Array, j: Array) -> Problem:
        return narrow(cut(head, facts, block, i, j), dtypes)

    step = functools.partial(update, facts, block[1])
    return scan_rows(layout.T, block[0], kinds, begin, fetch, step, close, split=split)


def start(rows: int, depth: int, dtype: Any) -> Online:
    """The state before any key."""
    zeros = jnp.zeros((rows,), dtype)
    return Online(
        jnp.full((rows,), lowest(dtype), dtype),
        zeros,
        jnp.zeros((rows, depth), dtype),
        zeros,
        jnp.full((rows,), -1, jnp.float32),
    )


def update(
    facts: Static, size: int, state: Online, block: Problem, j: Any, partial: bool
) -> Online:
    """The state after key block j of `size` keys."""
    logits = block_logits(block, facts, partial=partial)
    top, shrink, powers = rescale(state.top, logits)
    moment, first = state.moment, state.first
    if facts.statistics:
        below = jnp.where(logits == NEG_INF, 0, logits - top[:, None])
        lower = jnp.where(state.total == 0, 0, state.top - top)
        moment = (moment + state.total * lower) * shrink + jnp.sum(powers * below, axis=-1)
        here = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
        index = block_start(j, size, facts.layout.S) + first_at(jax.lax.stop_gradient(logits), here)
        newer = (here != NEG_INF) & ((first < 0) | ~(here <= state.top))  # true for NaN
        first = jnp.where(newer, index.astype(first.dtype), first)
    return Online(
        top,
        state.total * shrink + jnp.sum(powers, axis=-1),
        state.out * shrink[:, None] + weigh_values(block, facts, powers, logits),
        moment,
        first,
    )


def rescale(top: Array, logits: Array) -> tuple[Array, Array, Array]:
    """The maximum of rows, the rescaling factor of their sums, and the new exponentials.

        top' = max(top, max_s x_s),   exp(top - top'),   exp(x_s - top')

    Args:
        top: the maximum so far, `[..., Tb]`.
        logits: the logits of the next keys, `[..., Tb, Sb]`.
    """
    new = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
    return new, jnp.exp(top - new), jnp.exp(logits - new[..., None])


def close(i: Any, state: Online) -> Rows:
    """Divides by the total; an empty row is 0."""
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    top = jnp.where(empty, 0, state.top)
    log_total = jnp.log(total)
    entropy = log_total - state.moment / total
    return Rows(state.out / total[:, None], entropy, state.first, top, log_total)


def statistics_of(head: Problem, dtypes: Problem, rows: Rows) -> tuple[Array, Array, Array]:
    """Log-sum-exp, entropy and largest logit of rows `[T]`; of an empty one -inf, 0 and -inf."""
    lse = jnp.where(rows.first < 0, NEG_INF, rows.top + rows.log_total)
    return lse, rows.entropy, top_logits(head, dtypes, rows)


def top_logits(head: Problem, dtypes: Problem, rows: Rows) -> Array:
    """The largest logit of each row `[T]`, recomputed at its key to have a gradient.

    One pair for each row, O(T): the loop over blocks returns only its index.
    """
    head, empty = widen_low(head), rows.first < 0
    rows = rows._replace(first=jnp.maximum(rows.first, 0).astype(jnp.int32))
    every = jnp.arange(rows.first.shape[0])
    # On an explicit mesh a gather's operand and indices must have equal sharding: the select
    # broadcasts an array that several heads share.
    spread = (lambda x: jnp.where(rows.first[0] >= 0, x, x)) if is_explicit() else jnp.asarray

    def pair(x: Array) -> Array:
        row = every if x.shape[0] > 1 else jnp.zeros_like(every)
        column = rows.first if x.shape[1] > 1 else jnp.zeros_like(rows.first)
        return spread(x)[row, column][:, None, None]

    sides = Sides(
        query=jax.tree.map(lambda x: x[:, None], head.sides.query),
        key=jax.tree.map(lambda x: spread(x)[rows.first][:, None], head.sides.key),
        pair=jax.tree.map(pair, head.sides.pair),
    )
    is_nan = jnp.isnan(rows.top + rows.log_total)

    def logit(one: Sides, empty: Array) -> Array:
        pair = narrow(head._replace(sides=one), dtypes)
        return raw_logits(pair, ~empty[None, None])[0, 0]

    top = jax.vmap(logit)(sides, empty)
    top = jnp.where(is_nan, jnp.nan, top.astype(rows.top.dtype))
    return jnp.where(empty, NEG_INF, top)
