"""Token models for Linen."""

from attention_jax.layers import embedding, language, transformer
from attention_jax.linen.layer import Layer


class AbsolutePositions(embedding.AbsolutePositions, Layer):
    """Absolute position embeddings for Linen."""


class Transformer(transformer.Transformer, Layer):
    """The encoder–decoder for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import Transformer, additive
        >>> model = Transformer(1, 2, 8, 16, 11, 13, cross_score=additive(8))
        >>> source, target = jnp.ones((3, 5), int), jnp.ones((3, 4), int)
        >>> variables = model.init(jax.random.key(0), source, target)
        >>> model.apply(variables, source, target, source_mask=source > 0).shape
        (3, 4, 13)
    """


class TransformerLM(language.TransformerLM, Layer):
    """The language model for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerLM, greedy_decode
        >>> model = TransformerLM(2, 2, 8, 16, 11, positions="rotary")
        >>> tokens = jnp.ones((3, 5), int)
        >>> variables = model.init(jax.random.key(0), tokens)
        >>> model.apply(variables, tokens).shape
        (3, 5, 11)
        >>> greedy_decode(model, variables, tokens, max_length=4).shape
        (3, 4)
    """
