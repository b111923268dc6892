"""Multi-head attention of the sub-quadratic families for Linen."""

from attention_jax.layers import subquadratic
from attention_jax.linen.attention import MultiHeadAttention


class LinearAttention(subquadratic.LinearAttention, MultiHeadAttention):
    """Linear attention for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import LinearAttention
        >>> layer, x = LinearAttention(4, mask=aj.masks.causal()), jnp.ones((2, 7, 16))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 7, 16)
    """


class LowRankAttention(subquadratic.LowRankAttention, MultiHeadAttention):
    """Linformer for Linen."""


class NystromAttention(subquadratic.NystromAttention, MultiHeadAttention):
    """Nyström attention for Linen."""


class MemoryCompressedAttention(subquadratic.MemoryCompressedAttention, MultiHeadAttention):
    """Memory-compressed attention for Linen."""


class LSHAttention(subquadratic.LSHAttention, MultiHeadAttention):
    """Reformer self-attention for Linen; its hash is in the collection "hash"."""


class RoutedAttention(subquadratic.RoutedAttention, MultiHeadAttention):
    """Routed attention for Linen."""
