"""Attention pooling for NNX."""

from attention_jax.layers import pooling
from attention_jax.nnx.layer import DroppingLayer, module


@module
class AttentionPooling(pooling.AttentionPooling, DroppingLayer):
    """Attention pooling for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AttentionPooling
        >>> pool = AttentionPooling(6, 4, score="gated", rngs=nnx.Rngs(0))
        >>> bags = jnp.ones((2, 5, 6))
        >>> pool(bags, jnp.ones((2, 5), bool)).shape, pool.attention_weights(bags).shape
        ((2, 1, 6), (2, 1, 5))
    """
