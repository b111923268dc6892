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
from collections.abc import Callable
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
    by_kind,
    cut,
    drop,
    kinds_present,
    mask_logits,
    raw_logits,
    weights_times,
)
from attention_jax.kernels.online import Rows, close, start, top_logits, update
from attention_jax.kernels.problem import Problem, Static, block_kinds, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tiling
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED

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


class Walk(NamedTuple):
    """The order of a walk over known blocks: kinds as bytes, so that it is hashable."""

    shape: tuple[int, int]
    kinds: bytes


class Spec(NamedTuple):
    """All that is static about one head's problem; hashable."""

    structure: Any
    floating: tuple[bool, ...]
    facts: Static
    block: tuple[int, int]
    walk: Walk | None
    precision: Any

    def problem(self, floats: list[Any], others: list[Any]) -> tuple[Problem, Any]:
        """The problem and its traced kinds, put together again."""
        a, b = iter(floats), iter(others)
        leaves = [next(a) if flag else next(b) for flag in self.floating]
        return jax.tree.unflatten(self.structure, leaves)


def attend_head(
    head: Problem, facts: Static, block: tuple[int, int], kinds: Any, precision: Any
) -> Rows:
    """One head of one example."""
    known = isinstance(kinds, np.ndarray)
    walk = Walk(kinds.shape, kinds.astype(np.int8).tobytes()) if known else None
    leaves, structure = jax.tree.flatten((head, None if known else kinds))
    floating = tuple(bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in leaves)
    floats = [x for x, flag in zip(leaves, floating, strict=True) if flag]
    others = [x for x, flag in zip(leaves, floating, strict=True) if not flag]
    spec = Spec(structure, floating, facts, block, walk, precision)
    return _flash(spec, floats, others)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _flash(spec: Spec, floats: list[Any], others: list[Any]) -> Rows:
    head, kinds = spec.problem(floats, others)
    layout = spec.facts.layout

    def visit(state: Any, i: Any, j: Any, partial: bool) -> Any:
        at = jnp.minimum(j * spec.block[1], layout.S - spec.block[1])
        block = cut(head, spec.facts, spec.block, i, j)
        return update(state, block, spec.facts, at, partial=partial)

    with precision_of_products(spec.precision):
        state = start(layout.T, layout.V, accumulator(head))
        return close(walk(spec, kinds, state, visit))


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

    def visit(state: Rows, i: Any, j: Any, partial: bool) -> Rows:
        def score(moving: list[Any]) -> tuple[tuple[Array, Array], Problem]:
            block = cut(head_of(moving), facts, spec.block, i, j)
            value = block.sides.key["value"]
            if facts.guarded:
                value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
            return (raw_logits(block), value), block

        (raw, value), (d_logits, d_value), block = jax.jvp(
            score, (moving,), (velocity,), has_aux=True
        )
        at = _start(i, spec.block[0], facts.layout.T)
        row_lse = jax.lax.dynamic_slice_in_dim(lse, at, spec.block[0])[:, None]
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
        return Rows(state.out + d_out, state.lse + jnp.sum(change, axis=-1), d_mean, state.first)

    with precision_of_products(spec.precision):
        zeros = jax.tree.map(jnp.zeros_like, rows)
        change = walk(spec, kinds, zeros, visit)
    d_out = change.out - rows.out * change.lse[:, None]
    d_mean = change.mean - rows.mean * change.lse
    no_tangent = np.zeros(rows.first.shape, jax.dtypes.float0)
    return rows, Rows(d_out, change.lse, d_mean, no_tangent)


def _start(index: Any, size: int, length: int) -> Any:
    return jnp.minimum(index * size, length - size) if length % size else index * size


def walk(
    spec: Spec, kinds: Any, carry: Any, visit: Callable[[Any, Any, Any, bool], Any]
) -> Any:
    """Visits the blocks; `visit(state, i, j, partial)` maps the state of block i's rows.

    The carry holds the state of all rows, `[T, ...]`. Known kinds give two loops over exactly the
    blocks to visit, the full ones and the partial ones; traced kinds one loop over all, in which a
    skipped block costs a branch not taken.
    """
    length, size = spec.facts.layout.T, spec.block[0]

    def step(present: tuple[int, ...]) -> Callable[[Any, Any], tuple[Any, None]]:
        def body(carry: Any, xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
            i, j, kind = xs
            at = _start(i, size, length)
            rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, size), carry)
            rows = by_kind(
                present, kind, lambda rows, partial: visit(rows, i, j, partial), _unchanged, rows
            )
            return jax.tree.map(
                lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, at, 0), carry, rows
            ), None

        return jax.checkpoint(body, prevent_cse=False)

    if spec.walk is None:
        nT, nS = kinds.shape
        i, j = (x.ravel().astype(np.int32) for x in np.indices((nT, nS)))
        return jax.lax.scan(step(kinds_present(kinds)), carry, (i, j, kinds.ravel()))[0]
    plane = np.frombuffer(spec.walk.kinds, np.int8).reshape(spec.walk.shape)
    for kind in (FULL, PARTIAL):
        i, j = (x.astype(np.int32) for x in np.nonzero(plane == kind))
        if i.size:
            xs = (i, j, np.full(i.shape, kind, np.int8))
            carry = jax.lax.scan(step((kind,)), carry, xs)[0]
    return carry


def _unchanged(rows: Any, partial: bool) -> Any:
    return rows
