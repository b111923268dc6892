"""Attention outputs and row statistics in one pass over the blocks, in O(T + S) memory.

    Σ p² = Σ e^2(x - m) / l²,  Σ p³ likewise,  |diag(p) - p pᵀ|² = Σ p² - 2 Σ p³ + (Σ p²)²

m is the running maximum of the online softmax and l its total; the statistics are further running
sums beside them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF, lowest, precision_of_products, widen_low
from attention_jax.kernels.block import block_logits, cut, narrow, weigh_values
from attention_jax.kernels.block_loops import block_start, scan_rows
from attention_jax.kernels.online_softmax import rescale
from attention_jax.kernels.per_head import lower_heads
from attention_jax.kernels.problem import Problem, Static
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tile
from attention_jax.masks.mask import Mask

# Running sums over the keys of a row, by name, with e = exp(x - top): `total` Σ e, `square` Σ e²,
# `cube` Σ e³, `moment` Σ e x, `own` and `ahead` Σ e over keys at the query's and at later
# positions, `first` e of the first key, `count` of visible keys, `columns` Σ e c, `out` Σ e v;
# beside them the largest and the smallest visible logit, `top` and `least`.
Sums = dict[str, Array]
_DEGREES = {"count": 0, "square": 2, "cube": 3}  # in e; the others are linear


class Rows(NamedTuple):
    """Row statistics `[*B, N, T]`, as in `AttentionRecord`.

    `real_share [..., C]` is the weight on real keys, for each candidate; `lse [..., 2]` is the
    maximum and ln of the total.
    """

    entropy: Array
    relative_entropy: Array
    largest_weight: Array
    first_share: Array
    self_share: Array
    ahead_share: Array
    mean_key: Array
    visible: Array
    max_logit: Array
    logit_range: Array
    jacobian_norm: Array
    real_share: Array
    lse: Array


def attend_with_rows(request: Request, real: tuple[Any, ...]) -> tuple[Result, Rows]:
    """The output of a request, dropout included, and its row statistics, before dropout.

    Args:
        request: the request.
        real: bool arrays `[*#B, S]`, candidates for which keys are real.
    """
    layout = request.layout
    with precision_of_products(request.precision):
        heads, causal = lower_heads(request, tile(request)), is_causal(request.mask)
        heads.problem.sides.key["columns"] = _columns(layout, real)

        def one(kinds: Any, head: Problem) -> tuple[Array, Rows]:
            block = heads.tiling.block
            return _one_head(head, heads.dtypes, heads.facts, block, kinds, causal=causal)

        out, rows = heads.map(one)
    lead = len(heads.facts.sizes)
    out, rows = jax.tree.map(
        lambda x: x.reshape(*layout.batch, layout.N, *x.shape[lead:]), (out, rows)
    )
    out = jnp.swapaxes(out, -2, -3).astype(request.query.dtype)
    return Result(out), rows


def is_causal(mask: Mask | None) -> bool:
    """Whether the mask excludes all keys at later positions than the query's."""
    if mask is None:
        return False
    right = mask.interval().right
    return right is not None and right <= 0


def _columns(layout: Any, real: tuple[Any, ...]) -> Array:
    """`[*#B, 1, 1, S, C]`: the key's index, scaled to [0, 1], and whether it is real."""
    index = jnp.arange(layout.S, dtype=jnp.float32) / max(layout.S - 1, 1)
    ones = (1,) * len(layout.batch)
    columns = [index.reshape(*ones, layout.S)]
    for array in real:
        x = jnp.asarray(array)
        columns.append(x.reshape((1,) * (len(ones) + 1 - x.ndim) + x.shape).astype(jnp.float32))
    stacked = jnp.stack(jnp.broadcast_arrays(*columns), axis=-1)
    return stacked.reshape(*stacked.shape[:-2], 1, 1, *stacked.shape[-2:])


def _one_head(
    head: Problem,
    dtypes: Problem,
    facts: Static,
    block: tuple[int, int],
    kinds: Any,
    *,
    causal: bool,
) -> tuple[Array, Rows]:
    layout, wide = facts.layout, widen_low(head)
    shapes = {"columns": head.sides.key["columns"].shape[-1:], "out": (layout.V,)}
    names = "total", "count", "square", "cube", "moment", "own", "ahead", "first", "columns", "out"

    def begin(i: Array) -> Sums:
        rows = jnp.zeros((block[0],), facts.accumulator)
        zeros = {x: jnp.zeros((block[0], *shapes.get(x, ())), rows.dtype) for x in names}
        least = lowest(rows.dtype)
        return {**zeros, "top": rows + least, "least": rows - least}

    def fetch(i: Array, j: Array) -> Problem:
        return narrow(cut(wide, facts, block, i, j), dtypes)

    def step(state: Sums, fetched: Problem, j: Array, partial: bool) -> Sums:
        first = block_start(j, block[1], layout.S) == 0
        return _update(state, fetched, facts, first=first, partial=partial, causal=causal)

    return scan_rows(layout.T, block[0], kinds, begin, fetch, step, lambda i, state: _close(state))


def _update(
    state: Sums, block: Problem, facts: Static, *, first: Any, partial: bool, causal: bool
) -> Sums:
    logits = block_logits(block, facts, partial=partial)
    top, shrink, powers = rescale(state["top"], logits)
    # Without the barrier XLA computes the exponentials anew in each of the reductions below.
    powers, logits = jax.lax.optimization_barrier((powers, logits))
    fixed = jax.lax.stop_gradient((powers, logits))
    columns = block.sides.key["columns"].astype(powers.dtype)
    columns = jnp.concatenate([jnp.ones_like(columns[:, :1]), columns], axis=1)
    columns = jnp.matmul(powers, columns, precision=jax.lax.Precision.HIGHEST)
    new = {
        **_sum_planes(*fixed, block, partial=partial, causal=causal),
        "total": columns[:, 0],
        "columns": columns[:, 1:],
        "first": jnp.where(first, powers[:, 0], 0),
        "out": weigh_values(block, facts, powers, logits),
    }

    def add(name: str) -> Array:
        old = state[name]
        factor = (shrink ** _DEGREES.get(name, 1)).reshape(-1, *[1] * (old.ndim - 1))
        return old * factor + new[name] if name in new else old

    visible = logits if not partial else jnp.where(logits == NEG_INF, -lowest(top.dtype), logits)
    least = jnp.minimum(state["least"], jnp.min(visible, axis=-1))
    return {**{name: add(name) for name in state}, "top": top, "least": least}


def _sum_planes(
    powers: Array, logits: Array, block: Problem, *, partial: bool, causal: bool
) -> Sums:
    """The sums of a block that need elementwise products or comparisons."""
    rows, keys = (jnp.asarray(x["position"]) for x in (block.sides.query, block.sides.key))
    visible = logits != NEG_INF
    square, moment = (
        powers * powers,
        powers * (jnp.where(visible, logits, 0) if partial else logits),
    )
    own = jnp.where(keys[None, :] == rows[:, None], powers, 0)
    planes = {"square": square, "cube": square * powers, "moment": moment, "own": own}
    if not causal:
        planes["ahead"] = jnp.where(keys[None, :] > rows[:, None], powers, 0)
    if partial:
        planes["count"] = visible.astype(powers.dtype)
    sums = dict(zip(planes, _sum_rows(list(planes.values())), strict=True))
    return {"count": jnp.full_like(powers[:, 0], keys.size), **sums}


def _sum_rows(planes: list[Array]) -> list[Array]:
    """Row sums of `[Tb, Sb]` planes in one pass that materialises none of them.

    Runs of adjacent keys are first added elementwise, which vectorises.
    """
    rows, keys = planes[0].shape
    lanes = max(n for n in range(1, 65) if keys % n == 0 and (n == 1 or 2 * n <= keys))
    zeros = tuple(jnp.zeros((), x.dtype) for x in planes)
    runs = tuple(x.reshape(rows, keys // lanes, lanes) for x in planes)
    added = jax.lax.reduce(runs, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
    return [jnp.sum(x, axis=-1) for x in added]


def _close(state: Sums) -> tuple[Array, Rows]:
    empty, several = state["total"] == 0, state["count"] > 1
    total = jnp.where(empty, 1, state["total"])
    top, least = (jnp.where(empty, 0, state[name]) for name in ("top", "least"))
    log_total = jnp.log(total)
    entropy = jnp.where(empty, 0, (top - state["moment"] / total) + log_total)
    log_count = jnp.log(jnp.where(several, state["count"], 2))
    square, cube = state["square"] / total**2, state["cube"] / total**3
    columns = state["columns"] / total[:, None]
    rows = Rows(
        entropy=entropy,
        relative_entropy=jnp.where(several, entropy / log_count, 0),
        largest_weight=jnp.where(empty, 0, 1 / total),
        first_share=state["first"] / total,
        self_share=state["own"] / total,
        ahead_share=state["ahead"] / total,
        mean_key=columns[:, 0],
        visible=state["count"].astype(jnp.int32),
        max_logit=top,
        logit_range=top - least,
        jacobian_norm=jnp.sqrt(jnp.maximum(square - 2 * cube + square**2, 0)),
        real_share=columns[:, 1:],
        lse=jnp.stack([top, log_total], axis=-1),
    )
    return state["out"] / total[:, None], rows
