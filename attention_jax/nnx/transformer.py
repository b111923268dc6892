"""The encoder–decoder of "Attention Is All You Need", with its attention by choice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Memory,
    Source,
    Target,
    check_tokens,
    embeddable,
    standing,
    token_mask,
    vocabulary,
)
from attention_jax._modules.caches import check_batch, first_cache, memory_shape
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import Initializer
from attention_jax._modules.settings import check_settings
from attention_jax.nnx.embedding import absolute
from attention_jax.nnx.parts import check_options
from attention_jax.nnx.places import AnyPositions
from attention_jax.nnx.randomness import AnyRngs, Dropout
from attention_jax.nnx.scores import AnyScore
from attention_jax.nnx.stacks import TransformerDecoder, TransformerEncoder
from attention_jax.nnx.views import CrossAttentionViews


class Transformer(CrossAttentionViews):
    """A sequence-to-sequence Transformer, from token ids to logits of the next target token.

        x = √D · embed(token) + sinusoidal(position)
        memory = encoder(x_source);   logits = W_vocab decoder(x_target, memory)

    Masks say which tokens are real. They are boolean arrays of the ids' own shape (True is a real
    token), or mask objects such as `attention_jax.masks.padding(lengths)`. What a padded position
    computes is finite, and nobody sees it. A token's position is 0, 1, … unless it is given; under
    a boolean array real tokens alone count, so that padding may stand on either side.

    Args:
        num_layers: Layers of the encoder, and of the decoder.
        num_heads: N, the number of heads.
        features: D, the model's width.
        mlp_features: Width of the networks' hidden layers.
        source_vocab: Number of source tokens.
        target_vocab: Number of target tokens.
        score: The score of self-attention, as in `MultiHeadAttention`.
        cross_score: The score of the decoder's attention to the source.
        cross_attention: "attention", or "mean": the decoder sees the mean of the valid encoder
            states and nothing else of the source.
        norm: "post" as in the original, or "pre".
        positions: What says where a token stands: "sinusoidal" as in the original, or "learned",
            added to the embeddings; or a scheme of self-attention, as in `MultiHeadAttention`.
        max_length: How many learned positions there are; for them alone.
        tie_output: Whether the logits' weights are the target embedding's, as in the original;
            otherwise they are a layer of their own.
        share_embedding: Whether source and target have one embedding, as in the original; the
            vocabularies must then have one size.
        dropout_rate: Probability that an entry is dropped in training, of the embeddings and of
            what every sub-layer adds, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        dtype: Dtype of the computation; None follows the parameters.
        param_dtype: Dtype of the parameters.
        embedding_init: Initialiser of the embeddings; None is normal with variance 1/D.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: `scan_layers` and `remat` as in `TransformerEncoder`, and what
            `TransformerEncoderLayer` takes, for every layer.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import Transformer, additive
        >>> model = Transformer(1, 2, 8, 16, 11, 13, cross_score=additive(8), rngs=nnx.Rngs(0))
        >>> source, target = jnp.ones((3, 5), int), jnp.ones((3, 4), int)
        >>> model(source, target, source_mask=source > 0).shape
        (3, 4, 13)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.
        Press, Wolf 2017, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859
        (`tie_output`).
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        features: int,
        mlp_features: int,
        source_vocab: int,
        target_vocab: int,
        *,
        score: AnyScore = None,
        cross_score: AnyScore = None,
        cross_attention: str = "attention",
        norm: str = "post",
        positions: AnyPositions = "sinusoidal",
        max_length: int | None = None,
        tie_output: bool = True,
        share_embedding: bool = False,
        dropout_rate: float | int = 0.0,
        deterministic: Flag = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_options(self, rngs, options, "mask", "scan_layers", "remat")
        self.features = check_count("features", features, 1)
        check_count("source_vocab", source_vocab, 1)
        check_count("target_vocab", target_vocab, 1)
        if share_embedding and source_vocab != target_vocab:
            raise ValueError(
                f"share_embedding needs vocabularies of one size, got source_vocab {source_vocab} "
                f"and target_vocab {target_vocab}"
            )
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        flags = {"tie_output": tie_output, "share_embedding": share_embedding}
        check_settings(embedding_init=embedding_init, **flags, **dtypes)
        init = embedding_init or jax.nn.initializers.normal(features**-0.5)
        self.dtype = dtype
        self.places, scheme = absolute(positions, max_length, features, param_dtype, rngs)
        drawn = {"embedding_init": init, "rngs": rngs, **dtypes}
        self.target_embedding = nnx.Embed(target_vocab, features, **drawn)
        self.source_embedding = self.target_embedding
        if not share_embedding:
            self.source_embedding = nnx.Embed(source_vocab, features, **drawn)
        shared = {
            "norm": norm,
            "score": score,
            "positions": scheme,
            "dropout_rate": dropout_rate,
            "deterministic": deterministic,
            "rngs": rngs,
            **dtypes,
            **options,
        }
        sizes = (num_layers, num_heads, features, mlp_features)
        self.encoder = TransformerEncoder(*sizes, **shared)
        self.decoder = TransformerDecoder(
            *sizes, cross_score=cross_score, cross_attention=cross_attention, **shared
        )
        flags = {"name": type(self).__name__, "deterministic": deterministic, "rngs": rngs}
        self.dropout = Dropout(dropout_rate, **flags)
        self.output: nnx.Linear | None = nnx.data(
            None
            if tie_output
            else nnx.Linear(features, target_vocab, use_bias=False, rngs=rngs, **dtypes)
        )

    def encode(
        self,
        source: Source,
        source_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The encoder's states, one for each source token.

        Args:
            source: Ids `[*B, S]`.
            source_mask: Which source tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            query_positions: ints `[S]` or `[*B, S]`, where the tokens stand; by default as said.

        Returns:
            `[*B, S, features]`.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = standing(query_positions, source_mask, np.shape(source))
        mask = token_mask("source_mask", source_mask, np.shape(source))
        check_tokens("source", source, vocabulary(self.source_embedding), mask)
        x = self._embed(self.source_embedding, source, source_mask, at, **flags)
        return self.encoder(x, mask, query_positions=at, **flags)

    def decode(
        self,
        target: Target,
        memory: Memory,
        target_mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each target token.

        Args:
            target: Ids `[*B, T]`, the first being the one that begins every sentence.
            memory: The encoder's states `[*B, S, features]`.
            target_mask: Which target tokens are real.
            memory_mask: Which source tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            query_positions: ints `[T]` or `[*B, T]`, where the tokens stand; by default as said.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        told = {"deterministic": deterministic, "rngs": rngs, "query_positions": query_positions}
        return self.logits(self.decode_states(target, memory, target_mask, memory_mask, **told))

    def decode_states(
        self,
        target: Target,
        memory: Memory,
        target_mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T D"]:
        """The decoder's states, from which `logits` are made.

        Args:
            target: As in `decode`; so are the others.
            memory: As in `decode`.
            target_mask: As in `decode`.
            memory_mask: As in `decode`.
            deterministic: As in `decode`.
            rngs: As in `decode`.
            query_positions: As in `decode`.

        Returns:
            `[*B, T, features]`.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = standing(query_positions, target_mask, np.shape(target))
        inputs = self._inputs(target, memory, target_mask, memory_mask, flags, at)
        return self.decoder(*inputs, query_positions=at, **flags)

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> Any:
        """What `with_cache` needs before the first target token.

        Args:
            memory: The encoder's states `[*B, S, features]`; every layer projects them here, once.
            length: How many tokens there is room for.
            dtype: What keys and values of the tokens are stored in; None is the layers', or
                float32.
            memory_valid: bool `[*#B, S]`, which states are real; or say so by a mask in each step.

        Returns:
            Each layer's cache.

        Raises:
            ValueError: If there are fewer learned positions.
        """
        self.places.check_length(length)
        return self.decoder.new_cache(memory, length, dtype=dtype, memory_valid=memory_valid)

    def with_cache(
        self,
        target: Target,
        cache: Any,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits of the token after each of the next target tokens: rows of `decode`.

        Args:
            target: Ids `[*B, T]` of the T next tokens.
            cache: The tokens before, from `new_cache`.
            memory_mask: Which source tokens are real.
            valid: bool `[*#B, T]`, which target tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.

        Returns:
            `[*B, T, target_vocab]` and the next cache.
        """
        check_batch("target", target, cache, 1)
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = first_cache(cache).next_positions(np.shape(target)[-1], valid)
        check_tokens("target", target, vocabulary(self.target_embedding), valid)
        x = self._embed(self.target_embedding, target, valid, at, **flags)
        mask = token_mask("memory_mask", memory_mask, memory_shape(cache))
        x, cache = self.decoder.with_cache(x, cache, mask, valid=valid, **flags)
        return self.logits(x), cache

    def logits(self, states: Features) -> Float[Array, "*B T vocab"]:
        """Logits of target tokens.

        Args:
            states: The decoder's states `[*B, T, features]`.

        Returns:
            `[*B, T, target_vocab]`, in the states' dtype.
        """
        if self.output is None:
            return self.target_embedding.attend(jnp.asarray(states))
        return self.output(jnp.asarray(states))

    def __call__(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        source_positions: Any = None,
        target_positions: Any = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each target token, given the source.

        Args:
            source: Ids `[*B, S]`.
            target: Ids `[*B, T]`, the first being the one that begins every sentence.
            source_mask: Which source tokens are real.
            target_mask: Which target tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            source_positions: ints `[S]` or `[*B, S]`; by default as said.
            target_positions: ints `[T]` or `[*B, T]`; by default as said.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        memory = self.encode(source, source_mask, query_positions=source_positions, **flags)
        flags["query_positions"] = target_positions
        return self.decode(target, memory, target_mask, memory_mask, **flags)

    def _embed(
        self, embedding: nnx.Embed, ids: Any, real: AnyMask, at: Any = None, **flags: Any
    ) -> Array:
        x = embedding(embeddable(ids, vocabulary(embedding), real)) * self.features**0.5
        return self.dropout(self.places(x, at), **flags)

    def _inputs(
        self, target: Any, memory: Any, target_mask: Any, memory_mask: Any, flags: Any, at: Any
    ) -> tuple[Any, ...]:
        mask = token_mask("target_mask", target_mask, np.shape(target))
        check_tokens("target", target, vocabulary(self.target_embedding), mask)
        x = self._embed(self.target_embedding, target, target_mask, at, **flags)
        return x, memory, mask, token_mask("memory_mask", memory_mask, np.shape(memory)[:-1])
