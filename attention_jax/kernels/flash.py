"""Flash attention: blocks forward, and a derivative that recomputes them from the log-sum-exp.

    forward    online softmax over the visited blocks
    tangent    d out = Σ_s p (dx - d lse) v + p dv,   d lse = Σ_s p dx,   p = exp(x - lse)

The tangent is one linear function of the inputs' tangents, walked block by block under
`jax.checkpoint`; JAX transposes it into the backward pass (dv = pᵀ do, dx = p (do vᵀ - o·do + d
lse), then the transpose of the score's own block). So forward mode, reverse mode and their
nestings all come from this one rule, and what is saved is O(T + S): the inputs, `out` and `lse`.
A score's block is differentiated by `jax.jvp`; no score, bias or mask needs a rule of its own.

References:
    Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from attention_jax._core.axes import Array
from attention_jax._core.mapping import map_leading
from attention_jax._core.numerics import NEG_INF, precision_of_products
from attention_jax.kernels.block import (
    accumulator,
    cut,
    drop,
    mask_logits,
    raw_logits,
    weights_times,
)
from attention_jax.kernels.online import Online, Rows, close, start, top_logits, update
from attention_jax.kernels.problem import Problem, Static, block_kinds, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tiling
from attention_jax.kernels.walk import block_start, sweep, walk

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """What of the request this kernel cannot do: nothing."""
    return None


def run(request: Request) -> Result:
    """Computes the request."""
    with precision_of_products(request.precision):
        problem, facts = lower(request)
        block, loop = tiling(request)
        kinds = block_kinds(problem, facts, block, loop=loop)
        known = isinstance(kinds, np.ndarray)

        def one(parts: tuple[Problem, Any]) -> tuple[Array, Array, Array, Array]:
            head, traced = parts
            rows = attend_head(head, facts, block, kinds if known else traced, request.precision)
            top = top_logits(head, rows) if facts.statistics else rows.lse
            return rows.out, rows.lse, rows.mean, top

        row_top, row_total = (
            jax.lax.dynamic_slice_in_dim(x, at, block_size[0])[:, None]
            for x in (top, rows.log_total)
        )
        return block, d_block, row_top, row_total

    def contribute(fetched: tuple[Problem, Problem, Array, Array], partial: bool) -> Change:
        block, d_block, row_top, log_total = fetched
        (raw, value), (d_logits, d_value) = _push(block, d_block, guarded=facts.guarded)
        logits = mask_logits(block, facts, raw, partial=partial).astype(row_top.dtype)
        weights = jnp.exp((logits - row_top) - log_total)
        d_logits = d_logits.astype(logits.dtype)
        if partial:
            d_logits = jnp.where(logits == NEG_INF, 0, d_logits)
        change = weights * d_logits
        dropped = drop(block, facts, weights)
        d_out = weights_times(dropped * d_logits, value) + weights_times(dropped, d_value)
        d_lse = jnp.sum(change, axis=-1)
        d_mean = jnp.zeros_like(d_lse)
        if facts.statistics:
            seen = jnp.where(logits == NEG_INF, 0, logits)
            d_mean = jnp.sum(change * (seen + 1), axis=-1)
        return Change(d_out, d_lse, d_mean)

    with precision_of_products(spec.precision):
        zeros = Change(*(jnp.zeros_like(x) for x in rows[:3]))
        change = sweep(zeros, block_size, kinds, fetch, contribute)
    d_out = change.out - rows.out * change.lse[:, None]
    d_mean = change.mean - rows.mean * change.lse
    no_tangent: Any = jnp.zeros_like(rows.first)
    # of lse = top + log_total, all movement is the second's
    d_top = jnp.zeros_like(rows.top)
    return rows, Rows(d_out, change.lse, d_mean, no_tangent, d_top, change.lse)


def _push(block: Problem, d_block: Problem, *, guarded: bool) -> tuple[Any, Any]:
    """`(logits, value)` of a block and their tangents; `d_block` has None where nothing moves."""
    leaves, structure = jax.tree.flatten(block)
    d_leaves = structure.flatten_up_to(d_block)
    moves = [
        dx is not None and bool(jnp.issubdtype(x.dtype, jnp.floating))
        for x, dx in zip(leaves, d_leaves, strict=True)
    ]

    def logits_and_value(moving: list[Array]) -> tuple[Array, Array]:
        rest = iter(moving)
        chosen = [next(rest) if flag else x for flag, x in zip(moves, leaves, strict=True)]
        moved = jax.tree.unflatten(structure, chosen)
        value = moved.sides.key["value"]
        if guarded:
            value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
        return raw_logits(moved), value

    moving = [x for x, flag in zip(leaves, moves, strict=True) if flag]
    velocity = [dx for dx, flag in zip(d_leaves, moves, strict=True) if flag]
    return jax.jvp(logits_and_value, (moving,), (velocity,))
