"""Nyström attention: softmax attention approximated through landmarks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, MaskLike, Query, Value
from attention_jax._core.checks import as_array, check_count
from attention_jax._core.compiled import compiled
from attention_jax.masks.mask import Mask
from attention_jax.softmax import log_sum_exp
from attention_jax.subquadratic.few import attend_to_few, scaled
from attention_jax.subquadratic.low_rank import reject_causal_order
from attention_jax.subquadratic.problem import (
    NEVER,
    canonical,
    empty_output,
    finish,
    non_finite_rows,
    over_groups,
)
from attention_jax.subquadratic.visibility import mask_object


def nystrom_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    num_landmarks: int = 64,
    iterations: int = 6,
    mask: Mask | MaskLike | None = None,
    scale: Any = None,
) -> Float[Array, "*B T N V"]:
    """Nyström attention: softmax attention approximated through M landmarks, O((T + S)·M).

        out = softmax(q k̃ᵀ) · softmax(q̃ k̃ᵀ)⁺ · softmax(q̃ kᵀ) v

    The landmarks q̃ and k̃ are means over M runs of equal length; ⁺ is the pseudo-inverse, computed
    iteratively.

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        num_landmarks: M, at least 1. With at most M queries and keys, each is its own landmark, and
            the result is softmax attention up to the pseudo-inverse's error.
        iterations: number of iterations of the pseudo-inverse, at least 1. Each multiplies four
            M × M matrices.
        mask: padding, as in `low_rank_attention`. Runs are over unmasked keys and unmasked queries;
            if T = S, a query whose own key is masked is padding and excluded from the landmarks.
        scale: factor of the scores, a number, a scalar array or `[N]`; None is 1/√H.

    Returns:
        `[*B, T, N, V]` with the query's dtype; 0 for empty rows.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, or a mask other than padding: a landmark mixes keys of
            all positions, so causal order is not possible.

    Example:
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jnp.ones((2, 40, 4, 8))
        >>> aj.subquadratic.nystrom_attention(x, x, x, num_landmarks=6).shape
        (2, 40, 4, 8)

    References:
        Xiong et al. 2021, "Nyströmformer: A Nyström-Based Algorithm for Approximating
        Self-Attention", arXiv:2102.03902, §3.2 (the product, landmarks, pseudo-inverse).
    """
    mask = mask_object(mask)
    num_landmarks = check_count("num_landmarks", num_landmarks, 1)
    iterations = check_count("iterations", iterations, 1)
    arrays = (as_array(*pair) for pair in (("query", query), ("key", key), ("value", value)))
    return _run(*arrays, mask, scale, num_landmarks, iterations)


@functools.partial(compiled, static=(5, 6))
def _run(
    query: Any, key: Any, value: Any, mask: Any, scale: Any, num_landmarks: int, iterations: int
) -> Array:
    problem = canonical("nystrom_attention", query, key, value, mask)
    reject_causal_order("nystrom_attention", problem)
    layout = problem.layout
    empty = empty_output(problem)
    if empty is not None:
        return empty
    heads = layout.N
    queries = scaled(problem.query, scale)
    # A non-finite key is visible to all queries: their outputs are NaN for any landmarks.
    seen = problem.key_mask
    if seen is None:
        seen = jnp.ones((1, 1, layout.S), bool)
    few_queries, query_valid = landmarks(queries, problem.usable, min(num_landmarks, layout.T))
    few_keys, key_valid = landmarks(problem.key, seen, min(num_landmarks, layout.S))
    # Their values differ between query heads, so keys are repeated per head, also if K = 1.
    few_keys = jnp.repeat(few_keys, heads // few_keys.shape[1], axis=1)
    key_valid = over_groups(key_valid, heads)
    # Middle and right factor; an empty landmark has a row and a column of zeros.
    logits = jnp.einsum("bnlh,bnmh->bnlm", few_queries, few_keys)
    both = jnp.broadcast_to(query_valid[..., :, None] & key_valid[..., None, :], logits.shape)
    middle = log_sum_exp(logits, both)[1]
    since = jnp.where(seen, 0, NEVER)
    zero = jnp.zeros(few_queries.shape[2], jnp.int32)
    right, _ = attend_to_few(few_queries, problem.key, problem.value, since, zero)
    right = jnp.where(query_valid[..., None], right, 0)
    values = jnp.matmul(pseudo_inverse(middle, iterations), right)
    since = jnp.where(key_valid, 0, NEVER)
    out, nonempty = attend_to_few(queries, few_keys, values, since, jnp.zeros_like(problem.reach))
    return finish(problem, out, non_finite_rows(problem), nonempty)


def landmarks(x: Array, valid: Array, count: int) -> tuple[Array, Array]:
    """Landmarks: means over `count` runs of equal length of the valid rows.

    Args:
        x: `[B, N, T, H]`.
        valid: bool `[B or 1, 1 or N, T]`.
        count: number of runs; with fewer valid rows, each row is one run, and the rest are empty.

    Returns:
        `[B, N, count, H]`, and bool `[B or 1, 1 or N, count]`, non-empty runs.
    """
    total = jnp.sum(valid, axis=-1, keepdims=True, dtype=jnp.int32)
    rank = jnp.cumsum(valid, axis=-1, dtype=jnp.int32) - 1
    run = rank * jnp.minimum(count, jnp.maximum(total, 1)) // jnp.maximum(total, 1)
    member = (run[..., None] == jnp.arange(count, dtype=jnp.int32)[None, None, None]) & valid[
        ..., None
    ]
    size = jnp.sum(member, axis=2, dtype=jnp.int32)
    share = member.astype(x.dtype) / jnp.maximum(size, 1).astype(x.dtype)[:, :, None, :]
    share = jnp.broadcast_to(share, (*x.shape[:3], count))
    return jnp.einsum("bntm,bnth->bnmh", share, x), size > 0


def pseudo_inverse(matrix: Array, iterations: int) -> Array:
    """The pseudo-inverse of matrices `[..., L, M]` by a third-order iteration.

    Z ← ¼ Z (13 I - A Z (15 I - A Z (7 I - A Z))),   Z_0 = Aᵀ / (|A|_1 |A|_∞)
    """
    size = jnp.abs(matrix)
    rows, columns = (jnp.max(jnp.sum(size, axis), axis=-1)[..., None, None] for axis in (-1, -2))
    bound = rows * columns
    z = jnp.swapaxes(matrix, -1, -2) / jnp.where(bound > 0, bound, 1)
    one = jnp.eye(matrix.shape[-2], dtype=matrix.dtype)
    one = one.reshape((1,) * (matrix.ndim - 2) + one.shape)

    def body(_: Any, z: Array) -> Array:
        product = jnp.matmul(matrix, z)
        inner = 15 * one - jnp.matmul(product, 7 * one - product)
        return jnp.matmul(z, 13 * one - jnp.matmul(product, inner)) / 4

    return jax.lax.fori_loop(0, iterations, body, z)
