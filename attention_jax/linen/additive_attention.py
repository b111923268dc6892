"""Additive attention for Linen."""

from attention_jax.layers import additive
from attention_jax.linen.layer import AttentionLayer


class AdditiveAttention(additive.AdditiveAttention, AttentionLayer):
    """Additive attention for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8)
        >>> query, key = jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))
        >>> layer.apply(layer.init(jax.random.key(0), query, key), query, key).shape
        (2, 3, 10)
    """
