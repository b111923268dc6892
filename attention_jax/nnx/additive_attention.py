"""Additive attention for NNX."""

from attention_jax.layers import additive
from attention_jax.nnx.layer import DroppingLayer, module


@module
class AdditiveAttention(additive.AdditiveAttention, DroppingLayer):
    """Additive attention for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))).shape
        (2, 3, 10)
    """
