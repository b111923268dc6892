"""The derivative of the online softmax: blocks are recomputed from the log-sum-exp.

    d out = Σ_s p (dx - d lse) v + p dv,   d lse = Σ_s p dx,   p = exp(x - lse)

The tangent is one linear function of the inputs' tangents, a sum over blocks under
`jax.checkpoint`; JAX transposes it into the backward pass (dv = pᵀ do, dx = p (do vᵀ - o·do + d
lse), then the transpose of the score's block). This one rule gives forward mode, reverse mode and
their nestings, and the residuals are O(T + S): the inputs, `out` and `lse`. A score's block is
differentiated by `jax.jvp`; scores, biases and masks need no derivative rules.

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
from attention_jax._core.numerics import (
    NEG_INF,
    current_precision,
    is_floating,
    precision_of_products,
    widen_low,
)
from attention_jax._core.products import product_by_value
from attention_jax._core.pytrees import Partition, partition
from attention_jax.kernels import online_softmax
from attention_jax.kernels.block import (
    cut,
    drop,
    dtypes_of,
    mask_logits,
    narrow,
    push,
    raw_logits,
    visible_pairs,
    weights_times,
)
from attention_jax.kernels.block_loops import block_start, sum_blocks
from attention_jax.kernels.online_softmax import Rows
from attention_jax.kernels.problem import Problem, Static
from attention_jax.kernels.tiling import KnownKinds


class Change(NamedTuple):
    """The sums in the tangents of rows: out `[T, V]`; Σ p dx ln p and Σ p dx, `[T]`."""

    out: Array
    surprise: Array
    lse: Array


class Spec(NamedTuple):
    """The static part of one head's problem; hashable."""

    parts: Partition
    leaf_dtypes: tuple[np.dtype, ...]
    facts: Static
    block: tuple[int, int]
    known: KnownKinds | None
    precision: Any

    def problem(self, floats: list[Any], others: list[Any]) -> tuple[Problem, Any]:
        """The problem and the kinds of its blocks."""
        head, kinds = self.parts.join(floats, others)
        return head, kinds if self.known is None else self.known.array

    @property
    def dtypes(self) -> Problem:
        """The dtype of each leaf of the problem."""
        return jax.tree.unflatten(self.parts.structure, self.leaf_dtypes)[0]


def attend_head(
    head: Problem, kinds: Any, dtypes: Problem, facts: Static, block: tuple[int, int]
) -> Rows:
    """`online_softmax.attend_head` with its derivative by recomputation.

    The products of the derivative use the default precision at the time of this call.
    """
    known = isinstance(kinds, np.ndarray)
    both = head, None if known else kinds
    floats, others, parts = partition(both, map(is_floating, jax.tree.leaves(both)))
    leaf_dtypes = tuple(jax.tree.leaves((dtypes, dtypes_of(both[1]))))
    static_kinds = KnownKinds.of(kinds) if known else None
    spec = Spec(parts, leaf_dtypes, facts, block, static_kinds, current_precision())
    return _flash(spec, floats, others)


def _rows(spec: Spec, floats: list[Any], others: list[Any]) -> Rows:
    head, kinds = spec.problem(floats, others)
    with precision_of_products(spec.precision):
        return online_softmax.attend_head(
            head, kinds, spec.dtypes, spec.facts, spec.block, split=True
        )


_flash = jax.custom_jvp(_rows, nondiff_argnums=(0,))


@functools.partial(_flash.defjvp, symbolic_zeros=True)
def _flash_jvp(spec: Spec, primals: Any, tangents: Any) -> tuple[Rows, Rows]:
    floats, others = primals
    rows = _flash(spec, floats, others)
    facts, block_size = spec.facts, spec.block
    head, kinds = spec.problem(floats, others)
    # A zero tangent is None, which is not a leaf. Tangents of low precision are widened: their
    # transpose sums over blocks in float32.
    velocity = [None if isinstance(x, SymbolicZero) else widen_low(x) for x in tangents[0]]
    d_head, _ = spec.problem(velocity, [None] * len(others))

    def fetch(i: Array, j: Array) -> tuple[Problem, Problem, Array, Array]:
        block, d_block = (cut(x, facts, block_size, i, j) for x in (head, d_head))
        at = block_start(i, block_size[0], facts.layout.T)
        row_top, row_total = (
            jax.lax.dynamic_slice_in_dim(x, at, block_size[0])[:, None]
            for x in (rows.top, rows.log_total)
        )
        return narrow(block, spec.dtypes), d_block, row_top, row_total

    def contribute(fetched: tuple[Problem, Problem, Array, Array], partial: bool) -> Change:
        block, d_block, row_top, log_total = fetched
        visible = visible_pairs(block, partial=partial)

        def logits_and_value(block: Problem) -> tuple[Array, Array]:
            value = block.sides.key["value"]
            if facts.guarded:
                value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
            return raw_logits(block, visible), value

        (raw, value), (d_logits, d_value) = push(logits_and_value, block, d_block)
        logits = mask_logits(block, facts, raw, visible).astype(row_top.dtype)
        log_weights = (logits - row_top) - log_total
        weights = jnp.exp(log_weights)
        d_logits = d_logits.astype(logits.dtype)
        if partial:
            d_logits = jnp.where(logits == NEG_INF, 0, d_logits)
        change = weights * d_logits
        dropped = drop(block, facts, weights)
        d_out = weights_times(dropped * d_logits, value)
        if d_block.sides.key["value"] is not None:
            d_out = d_out + product_by_value(dropped, d_value).astype(d_out.dtype)
        d_lse = jnp.sum(change, axis=-1)
        surprise = jnp.zeros_like(d_lse)
        if facts.statistics:
            finite = jnp.where(logits == NEG_INF, 0, log_weights)
            surprise = jnp.sum(change * finite, axis=-1)
        return Change(d_out, surprise, d_lse)

    with precision_of_products(spec.precision):
        zeros = Change(*(jnp.zeros_like(x) for x in (rows.out, rows.entropy, rows.log_total)))
        change = sum_blocks(zeros, block_size, kinds, fetch, contribute)
    d_out = change.out - rows.out * change.lse[:, None]
    # entropy = -Σ p ln p and dp = p (dx - d lse)
    d_entropy = -change.surprise - rows.entropy * change.lse
    no_tangent: Any = jnp.zeros_like(rows.first)
    # lse = top + log_total, of which top is a constant
    d_top = jnp.zeros_like(rows.top)
    return rows, Rows(d_out, d_entropy, no_tangent, d_top, change.lse)
