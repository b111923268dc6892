"""Splitting the model width into heads, and merging heads."""

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from attention_jax._core.axes import AnyArray
from attention_jax._core.checks import check_count


def split_heads(x: Float[AnyArray, "*BT D"], num_heads: int) -> Float[Array, "*BT N H"]:
    """Splits the model width into heads, `[..., T, D] -> [..., T, N, H]`, D = N·H.

    Args:
        x: an array whose last axis is the width D.
        num_heads: N, a divisor of D.

    Returns:
        The array with the last axis split; head n has channels n·H .. (n + 1)·H - 1.

    Raises:
        ValueError: D is not a multiple of N.
    """
    num_heads = check_count("num_heads", num_heads, 1)
    if x.ndim < 1 or x.shape[-1] % num_heads:
        raise ValueError(
            f"width D = {x.shape[-1] if x.ndim else None} must be a multiple of "
            f"num_heads = {num_heads}"
        )
    depth = x.shape[-1] // num_heads
    return rearrange(jnp.asarray(x), "... (n h) -> ... n h", n=num_heads, h=depth)


def merge_heads(x: Float[AnyArray, "*BT N H"]) -> Float[Array, "*BT D"]:
    """Merges heads, `[..., T, N, H] -> [..., T, D]`: the inverse of `split_heads`."""
    if x.ndim < 2:
        raise ValueError(f"x must be [..., T, N, H], got shape {list(x.shape)}")
    return rearrange(jnp.asarray(x), "... n h -> ... (n h)")
