"""Multi-head attention of the sub-quadratic families for NNX."""

import dataclasses

from attention_jax.layers import subquadratic
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.layer import module


@module
class LinearAttention(subquadratic.LinearAttention, MultiHeadAttention):
    """Linear attention for NNX.

    To redraw random features assign `layer.feature_map.redraw(key)` to `layer.feature_map`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import LinearAttention
        >>> layer = LinearAttention(4, 16, mask=aj.masks.causal(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 7, 16))).shape
        (2, 7, 16)
    """

    in_features: int = dataclasses.field()


@module
class LowRankAttention(subquadratic.LowRankAttention, MultiHeadAttention):
    """Linformer for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import LowRankAttention
        >>> layer = LowRankAttention(4, 16, length=32, rank=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 20, 16))).shape
        (2, 20, 16)
    """

    in_features: int = dataclasses.field()


@module
class NystromAttention(subquadratic.NystromAttention, MultiHeadAttention):
    """Nyström attention for NNX."""

    in_features: int = dataclasses.field()


@module
class MemoryCompressedAttention(subquadratic.MemoryCompressedAttention, MultiHeadAttention):
    """Memory-compressed attention for NNX."""

    in_features: int = dataclasses.field()


@module
class LSHAttention(subquadratic.LSHAttention, MultiHeadAttention):
    """Reformer self-attention for NNX.

    To change the hash assign the data of another key to `layer.hash_key[...]`.
    """

    in_features: int = dataclasses.field()


@module
class RoutedAttention(subquadratic.RoutedAttention, MultiHeadAttention):
    """Routed attention for NNX."""

    in_features: int = dataclasses.field()
