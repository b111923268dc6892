"""The layers of a Transformer and their stacks for NNX."""

from attention_jax.layers import (
    decoder_layer,
    dropout,
    encoder_layer,
    feed_forward,
    stacks,
)
from attention_jax.nnx.layer import DroppingLayer, Layer, module


@module
class Dropout(dropout.Dropout, DroppingLayer):
    """Dropout for NNX."""


@module
class FeedForward(feed_forward.FeedForward, Layer):
    """The position-wise feed-forward network for NNX."""


@module
class TransformerEncoderLayer(encoder_layer.TransformerEncoderLayer, Layer):
    """The encoder layer for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoderLayer
        >>> layer = TransformerEncoderLayer(2, 8, 16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8)), aj.masks.padding(jnp.array([5, 3]))).shape
        (2, 5, 8)
    """


@module
class TransformerDecoderLayer(decoder_layer.TransformerDecoderLayer, Layer):
    """The decoder layer for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerDecoderLayer, additive
        >>> layer = TransformerDecoderLayer(2, 8, 16, cross_score=additive(4), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 8)), jnp.ones((2, 5, 8))).shape
        (2, 3, 8)
    """


@module
class TransformerEncoder(stacks.TransformerEncoder, Layer):
    """The encoder for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerEncoder
        >>> encoder = TransformerEncoder(2, 2, 8, 16, norm="pre", rngs=nnx.Rngs(0))
        >>> encoder(jnp.ones((3, 5, 8))).shape
        (3, 5, 8)
    """


@module
class TransformerDecoder(stacks.TransformerDecoder, Layer):
    """The decoder for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerDecoder
        >>> decoder = TransformerDecoder(2, 2, 8, 16, rngs=nnx.Rngs(0))
        >>> decoder(jnp.ones((3, 4, 8)), jnp.ones((3, 5, 8))).shape
        (3, 4, 8)
    """
