"""Low-rank attention (Linformer): keys and values projected along the sequence axis."""

from typing import Annotated, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, MaskLike, Query, Value
from attention_jax._core.checks import as_array
from attention_jax._core.compiled import compiled
from attention_jax.masks.mask import Mask
from attention_jax.subquadratic.few import attend_to_few, projection, scaled
from attention_jax.subquadratic.problem import (
    NEVER,
    Problem,
    canonical,
    empty_output,
    finish,
    non_finite_rows,
    over_groups,
)
from attention_jax.subquadratic.visibility import mask_object


def low_rank_attention(
    query: Query,
    key: Key,
    value: Value,
    key_projection: Annotated[Any, Float[Array, "*#K M S"]],
    value_projection: Annotated[Any, Float[Array, "*#K M S"]] | None = None,
    *,
    mask: Mask | MaskLike | None = None,
    scale: Any = None,
) -> Float[Array, "*B T N V"]:
    """Low-rank attention (Linformer): keys and values projected to M rows, O((T + S)·M).

        out = softmax(scale · q (E k)ᵀ) F v

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        key_projection: E, `[M, S]`, or `[K, M, S]` per key/value head.
        value_projection: F, likewise, with the same M; None uses E.
        mask: padding: `padding(...)`, `prefix(n)`, a bool array of keys `[*B, N, 1, S]` or of
            queries `[*B, N, T, 1]`, or several joined by `&`. Masked keys enter neither projection,
            and a row of E that is 0 on all visible keys is masked: with E = F = I this is softmax
            attention with the same mask.
        scale: factor of the scores, a number, a scalar array or `[N]`; None is 1/√H.

    Returns:
        `[*B, T, N, V]` with the query's dtype; 0 for empty rows.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, or a mask other than padding: a projected row mixes
            keys of all positions, so causal order is not possible.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jnp.ones((2, 40, 4, 8))
        >>> down = jax.random.normal(jax.random.key(0), (6, 40)) / 40**0.5
        >>> aj.subquadratic.low_rank_attention(x, x, x, down).shape
        (2, 40, 4, 8)

    References:
        Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768,
        eq. 7.
    """
    mask = mask_object(mask)
    arrays = (as_array(*pair) for pair in (("query", query), ("key", key), ("value", value)))
    as_array("key_projection", key_projection)
    if value_projection is None:
        value_projection = key_projection
    as_array("value_projection", value_projection)
    return _run(*arrays, key_projection, value_projection, mask, scale)


@compiled
def _run(
    query: Any, key: Any, value: Any, down_key: Any, down_value: Any, mask: Any, scale: Any
) -> Array:
    problem = canonical("low_rank_attention", query, key, value, mask)
    reject_causal_order("low_rank_attention", problem)
    layout = problem.layout
    sizes = (-1, layout.S)
    down_key = projection("key_projection", down_key, "M, S", sizes, layout.K)
    down_value = projection("value_projection", down_value, "M, S", sizes, layout.K)
    if down_key.shape[1] != down_value.shape[1]:
        raise ValueError(
            f"key_projection has {down_key.shape[1]} rows and value_projection "
            f"{down_value.shape[1]}: they must match (M)"
        )
    empty = empty_output(problem)
    if empty is not None:
        return empty
    down_key, down_value = (
        (over_groups(x[None], problem.kv_heads)[0] if x.shape[0] == layout.K else x).astype(
            problem.key.dtype
        )
        for x in (down_key, down_value)
    )
    keys, since = problem.key, jnp.zeros((1, 1, down_key.shape[1]), jnp.int32)
    if problem.key_mask is not None:
        keys = jnp.where(problem.key_mask[..., None], keys, 0)
        since = jnp.where(_entered(down_key, problem.key_mask, problem.kv_heads), 0, NEVER)
    few_keys = project(down_key, keys)
    few_values = project(down_value, problem.value)
    out, nonempty = attend_to_few(
        scaled(problem.query, scale), few_keys, few_values, since, jnp.zeros_like(problem.reach)
    )
    return finish(problem, out, non_finite_rows(problem), nonempty)


def _entered(down: Array, seen: Array, kv_heads: int) -> Array:
    """Whether rows of `down [1 or K, M, S]` use a visible key, bool `[B, 1 or K, M]`."""
    enters, seen = (down != 0).astype(jnp.float32), seen.astype(jnp.float32)
    if down.shape[0] == 1:
        return jnp.einsum("ms,bks->bkm", enters[0], seen) > 0
    seen = jnp.broadcast_to(seen, (seen.shape[0], kv_heads, seen.shape[2]))
    return jnp.einsum("kms,bks->bkm", enters, seen) > 0


def project(down: Array, x: Array) -> Array:
    """The product of `[1 or K, M, S]` and `[B, K, S, H]`, `[B, K, M, H]`."""
    if down.shape[0] == 1:
        return jnp.einsum("ms,bksh->bkmh", down[0], x)
    return jnp.einsum("kms,bksh->bkmh", down, x)


def reject_causal_order(name: str, problem: Problem) -> None:
    """Raises ValueError if the mask includes causal order."""
    if problem.mask.offset is not None:
        raise ValueError(
            f"{name} does not support causal order: it mixes keys of all positions; use "
            "memory_compressed_attention, linear_attention or attend"
        )
