"""Masked softmax and log-sum-exp.

    p_s = exp(x_s - lse),  lse = ln Σ_s exp(x_s),  over visible s only

Masked logits are replaced before exp, so they affect neither the value nor the gradient. An empty
row has weights 0 and lse -inf.

References:
    Milakov, Gimelshein 2018, "Online normalizer calculation for softmax", arXiv:1805.02867.
    Rabe, Staats 2021, "Self-attention Does Not Need O(n²) Memory", arXiv:2112.05682.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attention_jax._core.axes import AnyArray
from attention_jax._core.numerics import NEG_INF, lowest, stats_dtype
from attention_jax._core.pytrees import serializable_tuple


@serializable_tuple
class Stats(NamedTuple):
    """Statistics of each row of weights, `[*B, N, T]`, float32 (float64 for float64 inputs).

    Attributes:
        lse: log-sum-exp of the row's visible logits, natural log; -inf for an empty row.
        entropy: `-Σ p ln p` in nats; 0 for an empty row.
        max_logit: the largest visible logit; -inf for an empty row. Its gradient goes to the first
            key that attains it.
    """

    lse: Array
    entropy: Array
    max_logit: Array


def masked_softmax(
    logits: Float[AnyArray, "*shape"],
    mask: Bool[AnyArray, "*mask"] | None = None,
    axis: int = -1,
) -> Float[Array, "*shape"]:
    """Softmax over visible entries; rows sum to 1, empty rows to 0.

    Args:
        logits: floating; computed in float32 at least. An entry of -inf is masked.
        mask: bool, broadcastable to `logits`, True = visible.
        axis: the axis to normalise over.

    Returns:
        Weights with the dtype of `logits`.

    Raises:
        TypeError: `mask` is not boolean.
    """
    x = jnp.asarray(logits)
    if mask is not None:
        if mask.dtype != np.bool_:
            raise TypeError(f"mask must be boolean, got dtype {np.dtype(mask.dtype).name}")
        mask = jnp.broadcast_to(jnp.asarray(mask), x.shape)
    return _weights(x, mask, axis)


@functools.partial(jax.jit, static_argnames=("axis",))
def _weights(x: Array, mask: Array | None, axis: int) -> Array:
    return log_sum_exp(x.astype(stats_dtype(x.dtype)), mask, axis)[1].astype(x.dtype)


def log_sum_exp(x: Array, visible: Array | None, axis: int = -1) -> tuple[Array, Array]:
    """`(lse, weights)` along `axis`; entries of -inf are masked for any `visible`."""
    visible = x != NEG_INF if visible is None else visible & (x != NEG_INF)
    x = jnp.where(visible, x, 0)
    if x.shape[axis] == 0:
        shape = tuple(n for i, n in enumerate(x.shape) if i != axis % x.ndim)
        return jnp.full(shape, NEG_INF, x.dtype), x
    least = lowest(x.dtype)
    top = jnp.max(x, axis=axis, keepdims=True, where=visible, initial=least)
    top = jax.lax.stop_gradient(top)
    powers = jnp.where(visible, jnp.exp(jnp.where(visible, x - top, 0)), 0)
    total = jnp.sum(powers, axis=axis, keepdims=True)
    empty = total == 0
    # This where blocks gradients from masked weights.
    weights = jnp.where(visible, powers / jnp.where(empty, 1, total), 0)
    lse = jnp.where(empty, NEG_INF, top + jnp.log(jnp.where(empty, 1, total)))
    return jnp.squeeze(lse, axis), weights
