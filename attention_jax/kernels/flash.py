"""Flash attention: blocks forward, and a derivative that recomputes them from the log-sum-exp.

    forward    online softmax over the visited blocks
    tangent    d out = Σ_s p (dx - d lse) v + p dv,   d lse = Σ_s p dx,   p = exp(x - lse)

The tangent is one linear function of the inputs' tangents, walked block by block under
`jax.checkpoint`; JAX transposes it into the backward pass (dv = pᵀ do, dx = p (do vᵀ - o·do + d lse),
then the transpose of the score's own block). So forward mode, reverse mode and their nestings all
come from this one rule, and what is saved is O(T + S): the inputs, `out` and `lse`. A score's block
is differentiated by `jax.jvp`; no score, bias or mask needs a rule of its own.

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
from attention_jax.kernels.walk import block_start, walk

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

        parts = (problem, None if known else kinds)
        return finish(request, facts, *map_leading(one, parts, facts.sizes, loop=loop))


class Known(NamedTuple):
    """Kinds of blocks that are known while tracing, as bytes, so that they are hashable."""

    shape: tuple[int, int]
    kinds: bytes


class Change(NamedTuple):
    """Tangents of a query block's rows: out `[Tb, V]`, lse and mean `[Tb]`."""

    out: Array
    lse: Array
    mean: Array


class Spec(NamedTuple):
    """All that is static about one head's problem; hashable."""

    structure: Any
    floating: tuple[bool, ...]
    facts: Static
    block: tuple[int, int]
    known: Known | None
    precision: Any

    def problem(self, floats: list[Any], others: list[Any]) -> tuple[Problem, Any]:
        """The problem and the kinds of its blocks, put together again."""
        a, b = iter(floats), iter(others)
        leaves = [next(a) if flag else next(b) for flag in self.floating]
        head, kinds = jax.tree.unflatten(self.structure, leaves)
        if self.known is not None:
            kinds = np.frombuffer(self.known.kinds, np.int8).reshape(self.known.shape)
        return head, kinds


def attend_head(
    head: Problem, facts: Static, block: tuple[int, int], kinds: Any, precision: Any
) -> Rows:
    """One head of one example."""
    known = isinstance(kinds, np.ndarray)
    static_kinds = Known(kinds.shape, kinds.astype(np.int8).tobytes()) if known else None
    leaves, structure = jax.tree.flatten((head, None if known else kinds))
    floating = tuple(bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in leaves)
    floats = [x for x, flag in zip(leaves, floating, strict=True) if flag]
    others = [x for x, flag in zip(leaves, floating, strict=True) if not flag]
    spec = Spec(structure, floating, facts, block, static_kinds, precision)
    return _flash(spec, floats, others)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _flash(spec: Spec, floats: list[Any], others: list[Any]) -> Rows:
    head, kinds = spec.problem(floats, others)
    layout = spec.facts.layout

    def begin(i: Array) -> Online:
        return start(spec.block[0], layout.V, accumulator(head))

    def visit(state: Online, i: Array, j: Array, partial: bool) -> Online:
        at = block_start(j, spec.block[1], layout.S)
        block = cut(head, spec.facts, spec.block, i, j)
        return update(state, block, spec.facts, at, partial=partial)

    with precision_of_products(spec.precision):
        return walk(layout.T, spec.block[0], kinds, begin, visit, lambda i, state: close(state))


@functools.partial(_flash.defjvp, symbolic_zeros=True)
def _flash_jvp(spec: Spec, primals: Any, tangents: Any) -> tuple[Rows, Rows]:
    floats, others = primals
    rows = _flash(spec, floats, others)
    moves = [not isinstance(x, SymbolicZero) for x in tangents[0]]
    moving = [x for x, flag in zip(floats, moves, strict=True) if flag]
    velocity = [x for x, flag in zip(tangents[0], moves, strict=True) if flag]
    facts = spec.facts
    _, kinds = spec.problem(floats, others)

    def head_of(moving: list[Any]) -> Problem:
        rest = iter(moving)
        chosen = [next(rest) if flag else x for flag, x in zip(moves, floats, strict=True)]
        return spec.problem(chosen, others)[0]

    lse = jnp.where(rows.lse == NEG_INF, -NEG_INF, rows.lse)  # an empty row has weights 0

    def rows_of(x: Array, i: Array) -> Array:
        at = block_start(i, spec.block[0], facts.layout.T)
        return jax.lax.dynamic_slice_in_dim(x, at, spec.block[0])

    def begin(i: Array) -> Change:
        return Change(*(jnp.zeros_like(rows_of(x, i)) for x in rows[:3]))

    def visit(state: Change, i: Array, j: Array, partial: bool) -> Change:
        def score(moving: list[Any]) -> tuple[tuple[Array, Array], Problem]:
            block = cut(head_of(moving), facts, spec.block, i, j)
            value = block.sides.key["value"]
            if facts.guarded:
                value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
            return (raw_logits(block), value), block

        (raw, value), (d_logits, d_value), block = jax.jvp(
            score, (moving,), (velocity,), has_aux=True
        )
        row_lse = rows_of(lse, i)[:, None]
        logits = mask_logits(block, facts, raw, partial=partial).astype(row_lse.dtype)
        weights = jnp.exp(logits - row_lse)
        d_logits = d_logits.astype(logits.dtype)
        if partial:
            d_logits = jnp.where(logits == NEG_INF, 0, d_logits)
        change = weights * d_logits
        dropped = drop(block, facts, weights)
        d_out = weights_times(dropped * d_logits, value) + weights_times(dropped, d_value)
        d_mean = state.mean
        if facts.statistics:
            seen = jnp.where(logits == NEG_INF, 0, logits)
            d_mean = d_mean + jnp.sum(change * (seen + 1), axis=-1)
        return Change(state.out + d_out, state.lse + jnp.sum(change, axis=-1), d_mean)

    def end(i: Array, state: Change) -> Change:
        out, lse, mean = state
        d_out = out - rows_of(rows.out, i) * lse[:, None]
        return Change(d_out, lse, mean - rows_of(rows.mean, i) * lse)

    with precision_of_products(spec.precision):
        change = walk(facts.layout.T, spec.block[0], kinds, begin, visit, end)
    no_tangent = np.zeros(rows.first.shape, jax.dtypes.float0)
    return rows, Rows(*change, no_tangent)
