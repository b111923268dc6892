"""Token models for NNX."""

from attention_jax.layers import embedding, language, transformer
from attention_jax.nnx.layer import Layer, module


@module
class AbsolutePositions(embedding.AbsolutePositions, Layer):
    """Absolute position embeddings for NNX."""


@module
class Transformer(transformer.Transformer, Layer):
    """The encoder–decoder for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import Transformer, additive
        >>> model = Transformer(1, 2, 8, 16, 11, 13, cross_score=additive(8), rngs=nnx.Rngs(0))
        >>> source, target = jnp.ones((3, 5), int), jnp.ones((3, 4), int)
        >>> model(source, target, source_mask=source > 0).shape
        (3, 4, 13)
    """


@module
class TransformerLM(language.TransformerLM, Layer):
    """The language model for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerLM, greedy_decode
        >>> model = TransformerLM(2, 2, 8, 16, vocab=11, positions="rotary", rngs=nnx.Rngs(0))
        >>> tokens = jnp.ones((3, 5), int)
        >>> model(tokens).shape
        (3, 5, 11)
        >>> greedy_decode(model, tokens, max_length=4).shape
        (3, 4)
    """
