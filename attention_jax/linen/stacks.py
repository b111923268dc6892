"""The layers of a Transformer and their stacks for Linen."""

from attention_jax.layers import (
    decoder_layer,
    dropout,
    encoder_layer,
    feed_forward,
    stacks,
)
from attention_jax.linen.layer import Layer


class Dropout(dropout.Dropout, Layer):
    """Dropout for Linen."""


class FeedForward(feed_forward.FeedForward, Layer):
    """The position-wise feed-forward network for Linen."""


class TransformerEncoderLayer(encoder_layer.TransformerEncoderLayer, Layer):
    """The encoder layer for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import TransformerEncoderLayer
        >>> layer, x = TransformerEncoderLayer(2, 8, 16), jnp.ones((2, 5, 8))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> layer.apply(variables, x, aj.masks.padding(jnp.array([5, 3]))).shape
        (2, 5, 8)
    """


class TransformerDecoderLayer(decoder_layer.TransformerDecoderLayer, Layer):
    """The decoder layer for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerDecoderLayer, additive
        >>> layer = TransformerDecoderLayer(2, 8, 16, cross_score=additive(4))
        >>> x, memory = jnp.ones((2, 3, 8)), jnp.ones((2, 5, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x, memory), x, memory).shape
        (2, 3, 8)
    """


class TransformerEncoder(stacks.TransformerEncoder, Layer):
    """The encoder for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerEncoder
        >>> encoder, x = TransformerEncoder(2, 2, 8, 16, norm="pre"), jnp.ones((3, 5, 8))
        >>> encoder.apply(encoder.init(jax.random.key(0), x), x).shape
        (3, 5, 8)
    """


class TransformerDecoder(stacks.TransformerDecoder, Layer):
    """The decoder for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerDecoder
        >>> decoder, x, memory = TransformerDecoder(2, 2, 8, 16), jnp.ones((4, 8)), jnp.ones((5, 8))
        >>> decoder.apply(decoder.init(jax.random.key(0), x, memory), x, memory).shape
        (4, 8)
    """
