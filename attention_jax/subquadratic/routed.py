"""Routed attention: exact attention to a few selected blocks of keys per block of queries."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, MaskLike, Query, Value
from attention_jax._core.checks import as_array, check_count
from attention_jax._core.compiled import compiled
from attention_jax.masks.mask import Mask
from attention_jax.subquadratic.few import scaled
from attention_jax.subquadratic.problem import (
    Problem,
    Weighed,
    canonical,
    empty_output,
    finish,
    group,
    over_groups,
    weigh,
)
from attention_jax.subquadratic.visibility import mask_object


def routed_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    block_size: int = 64,
    num_blocks: int = 4,
    mask: Mask | MaskLike | None = None,
    scale: Any = None,
) -> Float[Array, "*B T N V"]:
    """Routed attention: softmax attention to k selected blocks of keys per block of queries.

        selected_i = top_k over j of  mean(queries of block i) · mean(keys of block j)
        out_t = softmax(scale · q_t · k_s over s in the selected blocks) v

    O(T · num_blocks · block_size), and (T / block_size)² products for the selection, which has no
    gradient. If all blocks are selected, this is softmax attention.

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        block_size: size of blocks of queries and of keys, at least 1; the last may be shorter.
        num_blocks: k, blocks of keys per block of queries, at least 1; all blocks if there are
            fewer.
        mask: causal order and padding, as in `linear_attention`. Masked keys and masked queries are
            excluded from the means; if T = S, a query whose own key is masked is excluded as well.
            With causal order the selection uses only a block's first query and key blocks that are
            entirely before it; its own block is always one of the k.
        scale: factor of the scores, a number, a scalar array or `[N]`; None is 1/√H.

    Returns:
        `[*B, T, N, V]` with the query's dtype; 0 for rows without a visible key in their blocks.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, or a mask other than causal order and padding.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jax.random.normal(jax.random.key(0), (2, 300, 4, 8))
        >>> out = aj.subquadratic.routed_attention(x, x, x, block_size=32, num_blocks=10)
        >>> bool(jnp.allclose(out, aj.attend(x, x, x), atol=1e-5))
        True

    References:
        Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189,
        §2 (mean keys, top-k, own block always selected); there the selection is per query.
    """
    mask = mask_object(mask)
    block_size = check_count("block_size", block_size, 1)
    num_blocks = check_count("num_blocks", num_blocks, 1)
    arrays = (as_array(*pair) for pair in (("query", query), ("key", key), ("value", value)))
    return _run(*arrays, mask, scale, block_size, num_blocks)


@functools.partial(compiled, static=(5, 6))
def _run(
    query: Any, key: Any, value: Any, mask: Any, scale: Any, block_size: int, num_blocks: int
) -> Array:
    problem = canonical("routed_attention", query, key, value, mask)
    empty = empty_output(problem)
    if empty is not None:
        return empty
    T, S = problem.layout.T, problem.layout.S
    offset = problem.mask.offset
    # Blocks of keys are aligned with blocks of queries, so each query block lies in one of them.
    front = 0 if offset is None else -offset % block_size
    B, K = problem.key.shape[:2]

    def blocks(x: Array, front: int = 0) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[2] = (front, -(front + x.shape[2]) % block_size)
        x = jnp.pad(x, widths)
        return x.reshape(*x.shape[:2], -1, block_size, *x.shape[3:])

    visible = jnp.ones((1, 1, S), bool) if problem.key_mask is None else problem.key_mask
    visible = blocks(jnp.broadcast_to(visible, (B, K, S)), front)
    bad = problem.bad_value | problem.bad_key[..., None]
    # Non-finite values are marked as NaN, which `block` replaces before the product.
    values = blocks(jnp.where(bad, jnp.nan, problem.value), front)
    keys = blocks(problem.key, front)
    queries = blocks(scaled(problem.query, scale))
    selected, valid = select_blocks(problem, queries, keys, visible, num_blocks, front)
    nT, k = selected.shape[2:]
    at = group(selected, K).reshape(B, K, -1)

    def gather(x: Array) -> Array:
        """The selected blocks of keys, `[nT, B, N, k · block_size, ...]`."""
        lead = at.reshape(*at.shape, *(1,) * (x.ndim - 3))
        x = jnp.take_along_axis(x, lead, axis=2)
        x = x.reshape(B, -1, nT, k * block_size, *x.shape[4:])
        return jnp.moveaxis(x, 2, 0)

    inside = np.arange(block_size, dtype=np.int32).reshape(1, 1, 1, 1, -1)
    index = selected[..., None] * block_size + inside - front
    index = jnp.moveaxis(index.reshape(*index.shape[:3], -1), 2, 0)
    valid = jnp.moveaxis(jnp.repeat(valid, block_size, axis=-1), 2, 0)
    reach = jnp.pad(problem.reach, (0, -T % block_size)).reshape(nT, 1, 1, block_size, 1)
    any_bad = jnp.any(bad)

    def block(parts: Any) -> Weighed:
        query, key, value, visible, index, reach = parts
        logits = jnp.einsum("bnth,bnsh->bnts", query, key)
        visible = visible[..., None, :] & (index[..., None, :] <= reach)
        bad = jnp.isnan(value)
        return weigh(logits, visible, jnp.where(bad, 0, value), bad, any_bad)

    parts = (jnp.moveaxis(queries, 2, 0), gather(keys), gather(values))
    parts = (*parts, gather(visible) & valid, index, reach)

    def whole(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 2).reshape(*queries.shape[:2], -1, *x.shape[4:])[:, :, :T]

    out, lse, non_finite = jax.tree.map(whole, jax.lax.map(jax.checkpoint(block), parts))
    return finish(problem, out, non_finite, lse != -jnp.inf)


def select_blocks(
    problem: Problem, queries: Array, keys: Array, visible: Array, num_blocks: int, front: int
) -> tuple[Array, Array]:
    """Selects the blocks of keys for each block of queries.

    Args:
        problem: the call.
        queries: `[B, N, nT, size, H]`.
        keys: `[B, K, nS, size, H]`.
        visible: bool `[B, K, nS, size]`.
        num_blocks: k.
        front: length of the padding before the first key.

    Returns:
        Indices int32 `[B, N, nT, k]`, and whether each is a valid selection, bool.
    """
    size = queries.shape[3]
    nT, nS = queries.shape[2], keys.shape[2]
    usable = jnp.pad(problem.usable, ((0, 0), (0, 0), (0, -problem.layout.T % size)))
    usable = usable.reshape(*queries.shape[:4])
    offset = problem.mask.offset
    if offset is not None:
        usable = usable & (jnp.arange(size) == 0).reshape(1, 1, 1, size)
    N = problem.layout.N
    scores = jnp.einsum(
        "bnih,bnjh->bnij", _means(queries, usable), over_groups(_means(keys, visible), N)
    )
    scores = jax.lax.stop_gradient(scores)
    some = over_groups(jnp.any(visible, axis=-1), N)[:, :, None, :]
    if offset is not None:
        own = np.arange(nT)[:, None] + (offset + front) // size
        others = np.arange(nS)
        before, beside = others < own, others == own
        some = some & before[None, None] | jnp.broadcast_to(beside, scores.shape)
        scores = jnp.where(beside[None, None], jnp.inf, scores)
    scores = jnp.where(some, scores, -jnp.inf)
    best, selected = jax.lax.top_k(scores, min(num_blocks, nS))
    return selected.astype(jnp.int32), best > -jnp.inf


def _means(x: Array, valid: Array) -> Array:
    """The mean of each block's valid rows, 0 if there are none."""
    count = jnp.maximum(jnp.sum(valid, axis=-1, dtype=jnp.int32), 1).astype(x.dtype)
    return jnp.sum(jnp.where(valid[..., None], x, 0), axis=-2) / count[..., None]
