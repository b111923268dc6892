"""Shaw attention: relative keys and relative values.

    out_t = Σ_s p_ts (v_s + value_table[k + clip(position_s - position_t, -k, k)])

The sum over value_table needs 2k + 1 numbers per query: the total weight of each clipped distance.
Distances within the band |distance| < k come from one pass of `attend` over the band; the two ends
come from the log-sum-exps of the keys beyond it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import (
    BiasLike,
    Key,
    KeyPositions,
    MaskLike,
    Query,
    QueryPositions,
    Value,
)
from attention_jax._core.checks import as_array, check_per_head
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.numerics import arange, matmul
from attention_jax._core.term import Term, over_heads
from attention_jax.attend import Implementation, attend, execute, make_request
from attention_jax.masks.data import from_array
from attention_jax.masks.mask import Mask
from attention_jax.masks.patterns import window
from attention_jax.positions.array_bias import ArrayBias
from attention_jax.positions.shaw import Table, check_odd_table, shaw
from attention_jax.scores.score import Score
from attention_jax.scores.similarity import scaled_dot


@arguments_of(attend)
def shaw_attention(  # noqa: D417
    query: Query,
    key: Key,
    value: Value,
    key_table: Table,
    value_table: Table,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    implementation: Implementation = None,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> Float[Array, "*B T N V"]:
    """Shaw et al.'s attention with relative keys and relative values, `[*B, T, N, V]`.

        e_ts  = score(q_t, k_s) + q_t · key_table[c_ts] / √H,   c_ts = k + clip(distance, -k, k)
        out_t = Σ_s softmax_s(e_ts) · (v_s + value_table[c_ts])

    No array of size T·S is built. It costs up to two more passes over the pairs, without values,
    and one over the band of distances below k. With `causal()`, the pass over later keys is empty
    and costs nothing.

    Args:
        key_table: `[2k + 1, H]` or `[N, 2k + 1, H]`, as for `positions.shaw`, which has no relative
            values.
        value_table: `[2k + 1, V]` or `[N, 2k + 1, V]`, differentiable; its k may differ.

    Returns:
        `[*B, T, N, V]` with the query's dtype.

    References:
        Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, eq. 3 and 4.
    """
    k = check_odd_table(value_table)
    if mask is not None and not isinstance(mask, Mask):
        mask = from_array(as_array("mask", mask))
    if bias is not None and not isinstance(bias, Term):
        bias = ArrayBias(as_array("bias", bias))
    score = scaled_dot() if score is None else score
    if not isinstance(score, Score):
        raise TypeError(f"score must be a score object, got {type(score).__name__}")
    score = score + shaw(key_table)
    given = {
        "score": score,
        "bias": bias,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    how = {"block_size": block_size, "precision": precision}
    layout = make_request(query, key, value, mask=mask, **given).layout
    check_per_head("value_table", value_table, "2k + 1, V", layout, 2 * k + 1, layout.V)

    def attend_part(value: Any, where: Mask | None) -> tuple[Array, Array, Array]:
        both = mask if where is None else where if mask is None else mask & where
        request = make_request(query, key, value, mask=both, statistics=True, **given, **how)
        result = execute(request, implementation)
        assert result.rows is not None  # the request is for statistics
        assert result.empty is not None
        lse, nonempty = (
            jnp.swapaxes(x, -1, -2)[..., None] for x in (result.rows.lse, ~result.empty)
        )
        return result.out, lse, nonempty

    out, lse, nonempty = attend_part(value, None)
    nothing = jnp.zeros((*layout.batch, layout.S, layout.K, 0), lse.dtype)

    def share(part: Array, some: Array) -> Array:
        """The weight of a part of the keys, from its log-sum-exp, and of which rows it has some."""
        return jnp.where(some, jnp.exp(jnp.where(some, part - lse, 0)), 0)

    if k == 0:
        weights = nonempty.astype(lse.dtype)
    else:
        before, after = (
            share(*attend_part(nothing, ~w)[1:]) for w in (window(k - 1, None), window(None, k - 1))
        )
        band, *part = attend_part(_residues(key_positions, layout, 2 * k - 1), window(k - 1, k - 1))
        band = _by_distance(band, query_positions, k).astype(lse.dtype) * share(*part)
        weights = jnp.concatenate([before, band, after], axis=-1)
    table = over_heads(value_table, 2, weights.ndim)
    relative = matmul(jnp.swapaxes(weights, -2, -3), table)
    return (out.astype(relative.dtype) + jnp.swapaxes(relative, -2, -3)).astype(out.dtype)


def _residues(positions: Any, layout: Any, count: int) -> Array:
    """One-hot of `position mod count` per key, which identifies the distance within a band."""
    positions = arange(layout.S) if positions is None else jnp.asarray(positions)
    hot = jax.nn.one_hot(positions % count, count, dtype=jnp.float32)
    hot = hot.reshape((1,) * (len(layout.batch) + 2 - hot.ndim) + hot.shape)[..., None, :]
    return jnp.broadcast_to(hot, (*layout.batch, layout.S, layout.K, count))


def _by_distance(band: Array, positions: Any, k: int) -> Array:
    """From residues to distances -(k - 1)..k - 1: rotates each row of `[..., T, N, 2k - 1]`."""
    T, count = band.shape[-3], 2 * k - 1
    positions = jnp.asarray(arange(T) if positions is None else positions)
    residue = (positions[..., None] + np.arange(1 - k, k)[(None,) * positions.ndim]) % count
    residue = residue.reshape((1,) * (band.ndim - 1 - residue.ndim) + residue.shape)[..., None, :]
    return jnp.take_along_axis(band, jnp.broadcast_to(residue, band.shape), axis=-1)
