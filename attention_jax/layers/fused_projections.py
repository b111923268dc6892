"""Fused projections: one matrix product for several projections of one input."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.numerics import promote


def fused_product(
    x: Array,
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    *,
    dtype: Any,
    precision: Any,
) -> Array:
    """`[x W_1 + b_1; x W_2 + b_2; …]` from one product with the concatenated kernels.

    Args:
        x: `[..., D]`.
        kernels: `[D, heads, depth]` each.
        biases: `[heads, depth]` each, or all of them None.
        dtype: Dtype of the product; None: the arrays' result type.
        precision: As in `jax.lax.Precision`.

    Returns:
        `[..., Σ heads·depth]`, for `split_parts`.
    """
    present = [b for b in biases if b is not None]
    dtype = promote(*(a.dtype for a in (x, *kernels, *present))) if dtype is None else dtype
    kernel = jnp.concatenate([k.reshape(k.shape[0], -1).astype(dtype) for k in kernels], axis=1)
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    y = jax.lax.dot_general(x.astype(dtype), kernel, dims, precision=precision)
    if present:
        bias = jnp.concatenate([b.reshape(-1).astype(dtype) for b in present])
        y = y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
    return y


class Projected(NamedTuple):
    """The output `y` of one projection of the input `x`, from a fused product."""

    x: Array
    y: Array


def split_parts(joined: Array, heads: Sequence[tuple[int, ...]]) -> list[Array]:
    """Splits `[..., Σ heads·depth]` into parts `[..., heads, depth]`."""
    ends = np.cumsum([math.prod(shape) for shape in heads])[:-1].tolist()
    parts = jnp.split(joined, ends, axis=-1)
    return [p.reshape(*p.shape[:-1], *shape) for p, shape in zip(parts, heads, strict=True)]
