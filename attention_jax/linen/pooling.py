"""Attention pooling for Linen."""

from attention_jax.layers import pooling
from attention_jax.linen.layer import AttentionLayer


class AttentionPooling(pooling.AttentionPooling, AttentionLayer):
    """Attention pooling for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AttentionPooling
        >>> pool, bags = AttentionPooling(6, 4, score="gated"), jnp.ones((2, 5, 6))
        >>> pool.apply(pool.init(jax.random.key(0), bags), bags, jnp.ones((2, 5), bool)).shape
        (2, 1, 6)
    """
