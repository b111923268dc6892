"""Softmax attention to M compressed keys, O(T·M), in runs of queries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Shape
from attention_jax._core.checks import as_array
from attention_jax.softmax import log_sum_exp
from attention_jax.subquadratic.problem import group

# Queries per run; the weights of one run are in memory, and recomputed in the backward pass.
_RUN = 1024


def attend_to_few(
    query: Array, key: Array, value: Array, since: Array, reach: Array
) -> tuple[Array, Array]:
    """`softmax(q · kᵀ) v`; key m is visible to query t if `since_m <= reach_t`.

    Args:
        query: `[B, N, T, H]`, scaled.
        key: `[B, K, M, H]`.
        value: `[B, K, M, V]`.
        since: int32 `[B, 1 or K, M]`.
        reach: int32 `[T]`.

    Returns:
        `[B, N, T, V]`, 0 for empty rows; and bool `[B, N, T]`, non-empty rows.
    """
    K = key.shape[1]
    T = query.shape[2]

    def run(parts: tuple[Array, Array]) -> tuple[Array, Array]:
        query, reach = parts
        logits = jnp.einsum("bkgth,bkmh->bkgtm", query, key)
        visible = since[:, :, None, None, :] <= reach[None, None, None, :, None]
        lse, weights = log_sum_exp(logits, jnp.broadcast_to(visible, logits.shape))
        return jnp.einsum("bkgtm,bkmv->bkgtv", weights, value), lse != -jnp.inf

    queries = group(query, K)
    if T <= _RUN:
        out, nonempty = run((queries, reach))
    else:
        short = -T % _RUN
        queries = jnp.pad(queries, [(0, short if axis == 3 else 0) for axis in range(5)])
        queries = jnp.moveaxis(queries.reshape(*queries.shape[:3], -1, _RUN, query.shape[-1]), 3, 0)
        reaches = jnp.pad(reach, (0, short)).reshape(-1, _RUN)
        out, nonempty = jax.lax.map(jax.checkpoint(run), (queries, reaches))
        out = jnp.moveaxis(out, 0, 3)
        out = out.reshape(*out.shape[:3], -1, value.shape[-1])[:, :, :, :T]
        nonempty = jnp.moveaxis(nonempty, 0, 3).reshape(*out.shape[:3], -1)[..., :T]
    heads = query.shape[:2]
    return out.reshape(*heads, *out.shape[3:]), nonempty.reshape(*heads, T)


def scaled(query: Array, scale: Any) -> Array:
    """`query [B, N, T, H]` times the scale: 1/√H, a scalar, or `[N]`.

    Raises:
        ValueError: the scale is neither a scalar nor `[N]`.
    """
    if scale is None:
        return query * (1 / np.sqrt(max(query.shape[-1], 1)).item())
    factor = jnp.asarray(scale).astype(query.dtype)
    heads = query.shape[1]
    if factor.shape not in ((), (heads,)):
        raise ValueError(
            f"scale has shape {list(factor.shape)} but must be a scalar or [N] = [{heads}]"
        )
    return query * (factor if factor.ndim == 0 else factor[None, :, None, None])


def projection(name: str, array: Any, letters: str, sizes: Shape, heads: int) -> Array:
    """A parameter `[sizes]`, shared, or `[K, sizes]`, as `[1 or K, sizes]`.

    Args:
        name: the argument's name.
        array: the argument.
        letters: `sizes` in letters, for error messages.
        sizes: the required last axes; -1 is any size.
        heads: K.

    Raises:
        ValueError: any other shape.
    """
    shape = tuple(as_array(name, array).shape)
    own = shape[len(shape) - len(sizes) :]
    fits = len(own) == len(sizes) and all(
        want in (-1, got) for want, got in zip(sizes, own, strict=True)
    )
    if not fits or shape[: len(shape) - len(sizes)] not in ((), (heads,)):
        wanted = ", ".join("any" if size == -1 else str(size) for size in sizes)
        raise ValueError(
            f"{name} has shape {list(shape)} but must be [{letters}] = [{wanted}], or "
            f"[K, {letters}] with K = {heads}"
        )
    array = jnp.asarray(array)
    return array if len(shape) > len(sizes) else array[None]
