"""One block of one head: its slices, logits, mask, dropout and product with the values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF, is_floating, matmul
from attention_jax._core.products import weighted_sum
from attention_jax._core.pytrees import partition
from attention_jax._core.term import Sides, without_masked
from attention_jax.dropout import keep
from attention_jax.kernels.block_loops import block_start
from attention_jax.kernels.problem import Problem, Static, part
from attention_jax.masks.mask import View, spread


def cut(problem: Problem, facts: Static, block: tuple[int, int], i: Any, j: Any) -> Problem:
    """Block (i, j) of one head's problem.

    A last block that would exceed the length starts earlier instead, and "own" marks its rows or
    columns that are in no other block: nothing is padded or copied.
    """
    T, S = facts.layout.T, facts.layout.S

    def rows(x: Any, at: Any, size: int, axis: int) -> Any:
        return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, at, size, axis)

    def one(side: dict[str, Any], index: Any, size: int, length: int) -> dict[str, Any]:
        at = block_start(index, size, length)
        new = jax.tree.map(lambda x: rows(x, at, size, 0), side)
        if length % size:
            new["own"] = at + jnp.arange(size, dtype=jnp.int32) >= index * size
        return new

    query = one(problem.sides.query, i, block[0], T)
    key = one(problem.sides.key, j, block[1], S)
    starts = block_start(i, block[0], T), block_start(j, block[1], S)
    pair = jax.tree.map(
        lambda x: rows(rows(x, starts[0], block[0], 0), starts[1], block[1], 1), problem.sides.pair
    )
    return problem._replace(sides=Sides(query, key, pair))


def dtypes_of(tree: Any) -> Any:
    """The dtype of each leaf."""
    return jax.tree.map(lambda x: x.dtype, tree)  # a PRNG key's dtype is not a NumPy dtype


def narrow(block: Problem, dtypes: Problem) -> Problem:
    """A block in the `dtypes_of` the whole problem.

    Kernels slice blocks from float32 copies of low-precision arrays, so that reverse mode sums the
    cotangents of all blocks, heads and examples in float32. Parameters and pair data stay wide: the
    term converts them.
    """

    def cast(x: Any, y: Any) -> Any:
        return jax.tree.map(lambda x, y: x if x.dtype == y else x.astype(y), x, y)

    def side(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        return {name: cast(x, old[name]) if name in old else x for name, x in new.items()}

    query, key = map(side, block.sides[:2], dtypes.sides[:2])
    return block._replace(sides=block.sides._replace(query=query, key=key))


def raw_logits(block: Problem, visible: Array | None = None) -> Array:
    """Score plus bias of one block `[Tb, Sb]`, before any masking.

    If the term may overflow, rows and columns without a `visible` pair are replaced by ones.
    """
    positions, data = part(block.sides, "position"), part(block.sides, "term")
    if visible is not None and block.term.may_overflow:
        data = without_masked(data, visible)
    # In the dense kernel positions may be NumPy arrays; a score's block function gets JAX arrays.
    query_positions, key_positions = jnp.asarray(positions.query), jnp.asarray(positions.key)
    return block.term.block(data, query_positions, key_positions)


def visible_pairs(block: Problem, *, partial: bool) -> Array | None:
    """The visible pairs under the mask and the plane's ends, `[#Tb, #Sb]`; None is all."""
    visible = None
    if not partial:
        return visible
    for own, axis in ((block.sides.query.get("own"), 1), (block.sides.key.get("own"), 0)):
        if own is not None:
            own = jnp.expand_dims(own, axis)
            visible = own if visible is None else visible & own
    if block.mask is not None:
        positions = spread(part(block.sides, "position"))
        view = View(spread(part(block.sides, "mask")), positions.query, positions.key)
        allowed = jnp.asarray(block.mask.allowed(view))
        visible = allowed if visible is None else visible & allowed
    return visible


def block_logits(block: Problem, facts: Static, *, partial: bool) -> Array:
    """Score plus bias of one block in the accumulator's dtype, masked pairs at -inf."""
    visible = visible_pairs(block, partial=partial)
    raw = raw_logits(block, visible)
    return mask_logits(block, facts, raw.astype(facts.accumulator), visible)


def mask_logits(block: Problem, facts: Static, logits: Array, visible: Array | None) -> Array:
    """Logits with masked pairs at -inf, and NaN at visible pairs of non-finite queries or keys."""
    if facts.guarded:
        query, key = block.sides.query["bad"], block.sides.key["bad"]
        nans = jnp.where(query, jnp.nan, 0.0)[:, None] + jnp.where(key, jnp.nan, 0.0)[None, :]
        masked = logits == NEG_INF
        logits = logits + nans.astype(logits.dtype)
        if facts.may_hide:
            logits = jnp.where(masked, NEG_INF, logits)
    return logits if visible is None else jnp.where(visible, logits, NEG_INF)


def push(
    function: Callable[[Problem], Any], problem: Problem, velocity: Problem
) -> tuple[Any, Any]:
    """`function(problem)` and its tangent; a leaf of `velocity` is None if its tangent is zero."""
    leaves, structure = jax.tree.flatten(problem)
    d_leaves = structure.flatten_up_to(velocity)
    moves = [dx is not None and is_floating(x) for x, dx in zip(leaves, d_leaves, strict=True)]
    moving, fixed, parts = partition(problem, moves)
    speeds = [dx for dx, flag in zip(d_leaves, moves, strict=True) if flag]
    speeds = [dx.astype(x.dtype) for x, dx in zip(moving, speeds, strict=True)]
    return jax.jvp(lambda moving: function(parts.join(moving, fixed)), (moving,), (speeds,))


def first_at(logits: Array, top: Array) -> Array:
    """Index of the first key whose logit is its row's maximum `top`, int32; the last of NaN rows.

    `argmax` takes four times as long on a CPU, longer than the rest of a block.
    """
    keys = logits.shape[-1]
    index = jnp.arange(keys, dtype=jnp.int32)
    return jnp.min(jnp.where(logits == top[..., None], index, np.int32(keys - 1)), axis=-1)


def entropy_of(weights: Array, axis: int = -1) -> Array:
    """`-Σ p ln p` of rows, from the weights: `lse - Σ p x` cancels for large logits."""
    return -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1)), axis=axis)


def weigh_values(block: Problem, facts: Static, weights: Array, logits: Array) -> Array:
    """`weights · value` after dropout, in at least float32; masked NaN values are ignored."""
    value = block.sides.key["value"]
    weights = drop(block, facts, weights)
    if not facts.guarded:
        return weights_times(weights, value)
    finite = jnp.isfinite(value)
    out = weights_times(weights, jnp.where(finite, value, jnp.zeros((), value.dtype)))

    def visible_nans() -> Array:
        count = matmul((logits != NEG_INF).astype(jnp.float32), (~finite).astype(jnp.float32))
        return jnp.where(count > 0, jnp.nan, 0.0).astype(out.dtype)

    nans = jax.lax.cond(block.bad_value, visible_nans, lambda: jnp.zeros_like(out))
    return out + jax.lax.stop_gradient(nans)


def weights_times(weights: Array, value: Array) -> Array:
    """`weights · value`, accumulated in the weights' dtype."""
    return weighted_sum(weights, value).astype(weights.dtype)


def drop(block: Problem, facts: Static, weights: Array) -> Array:
    """Weights after dropout, kept ones divided by the keep rate."""
    if facts.dropout_rate == 0:
        return weights
    bits = part(block.sides, "dropout")
    kept = keep(bits.query, bits.key, facts.dropout_rate)
    return jnp.where(kept, weights / (1 - facts.dropout_rate), 0)
