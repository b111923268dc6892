"""The encoder–decoder of "Attention Is All You Need", with its attention by choice."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Memory,
    Source,
    Target,
    check_choice,
    check_tokens,
    embeddable,
    standing,
    token_mask,
    vocabulary,
)
from attention_jax._modules.caches import check_batch, first_cache, memory_shape
from attention_jax._modules.flags import Flag
from attention_jax._modules.policy import Remat, checkpoint_policy
from attention_jax._modules.recipes import Initializer
from attention_jax.linen.embedding import AbsolutePositions, absolute, check_length
from attention_jax.linen.parts import Parts
from attention_jax.linen.scores import AnyPositions, AnyScore, check_score
from attention_jax.linen.stacks import TransformerDecoder, TransformerEncoder
from attention_jax.softmax import Stats


class Transformer(Parts):
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
        cross_score: The score of the decoder's attention to the source.
        cross_attention: "attention", or "mean": the decoder sees the mean of the valid encoder
            states and nothing else of the source.
        tie_output: Whether the logits' weights are the target embedding's, as in the original;
            otherwise they are a layer of their own.
        share_embedding: Whether source and target have one embedding, as in the original; the
            vocabularies must then have one size.
        embedding_init: Initialiser of the embeddings; None is normal with variance 1/D.
        dropout_rate: Probability that an entry is dropped in training, of the embeddings and of
            what every sub-layer adds, in [0, 1).
        scan_layers: As in `TransformerEncoder`; so is `remat`.
        remat: As in `TransformerEncoder`.
        positions: What says where a token stands: "sinusoidal" as in the original, or "learned",
            added to the embeddings; or a scheme of self-attention, as in `MultiHeadAttention`.
        max_length: How many learned positions there are; for them alone.
        **options: As in `TransformerEncoderLayer`, for every layer.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import Transformer, additive
        >>> model = Transformer(1, 2, 8, 16, 11, 13, cross_score=additive(8))
        >>> source, target = jnp.ones((3, 5), int), jnp.ones((3, 4), int)
        >>> variables = model.init(jax.random.key(0), source, target)
        >>> model.apply(variables, source, target, source_mask=source > 0).shape
        (3, 4, 13)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.
        Press, Wolf 2017, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859
        (`tie_output`).
    """

    num_layers: int
    num_heads: int
    features: int
    mlp_features: int
    source_vocab: int
    target_vocab: int
    _: dataclasses.KW_ONLY
    cross_score: AnyScore = None
    cross_attention: str = "attention"
    tie_output: bool = True
    share_embedding: bool = False
    embedding_init: Initializer | None = None
    positions: AnyPositions = "sinusoidal"
    max_length: int | None = None
    scan_layers: bool = False
    remat: Remat = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "features", "source_vocab", "target_vocab"):
            check_count(name, getattr(self, name), 1)
        if self.share_embedding and self.source_vocab != self.target_vocab:
            raise ValueError(
                "share_embedding needs vocabularies of one size, got source_vocab "
                f"{self.source_vocab} and target_vocab {self.target_vocab}"
            )
        _, scheme = absolute(self.positions, self.max_length)
        self._check(self.num_heads, self.features, self.mlp_features, scheme)
        checkpoint_policy(self.remat)
        check_choice("cross_attention", self.cross_attention, "attention", "mean")
        check_score(self.cross_score)
        if self.cross_attention == "mean" and self.cross_score is not None:
            raise ValueError('cross_attention="mean" has no score: leave cross_score out')
        super().__post_init__()

    def setup(self) -> None:
        """The parts."""
        dtypes = self._take("dtype", "param_dtype")
        init = self.embedding_init or jax.nn.initializers.normal(self.features**-0.5)
        self.source_embedding = nn.Embed(
            self.source_vocab, self.features, embedding_init=init, **dtypes
        )
        self.target_embedding = (
            self.source_embedding
            if self.share_embedding
            else nn.Embed(self.target_vocab, self.features, embedding_init=init, **dtypes)
        )
        sizes = (self.num_layers, self.num_heads, self.features, self.mlp_features)
        kind, scheme = absolute(self.positions, self.max_length)
        self.places = AbsolutePositions(
            kind=kind, **self._take("max_length", "features", "param_dtype")
        )
        shared = {**self._shared(), **self._take("scan_layers", "remat"), "positions": scheme}
        self.encoder = TransformerEncoder(*sizes, **shared)
        cross = self._take("cross_score", "cross_attention")
        self.decoder = TransformerDecoder(*sizes, **cross, **shared)
        self.dropout = self._dropout()
        self.output = (
            None if self.tie_output else nn.Dense(self.target_vocab, use_bias=False, **dtypes)
        )

    def encode(
        self,
        source: Source,
        source_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The encoder's states, one for each source token.

        Args:
            source: Ids `[*B, S]`.
            source_mask: Which source tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            query_positions: ints `[S]` or `[*B, S]`, where the tokens stand; by default as said.

        Returns:
            `[*B, S, features]`.
        """
        at = standing(query_positions, source_mask, np.shape(source))
        mask = token_mask("source_mask", source_mask, np.shape(source))
        check_tokens("source", source, vocabulary(self.source_embedding), mask)
        x = self._embed(self.source_embedding, source, source_mask, deterministic, at)
        return self.encoder(x, mask, deterministic, query_positions=at)

    def decode(
        self,
        target: Target,
        memory: Memory,
        target_mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each target token.

        Args:
            target: Ids `[*B, T]`, the first being the one that begins every sentence.
            memory: The encoder's states `[*B, S, features]`.
            target_mask: Which target tokens are real.
            memory_mask: Which source tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            query_positions: ints `[T]` or `[*B, T]`, where the tokens stand; by default as said.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        inputs = (target, memory, target_mask, memory_mask, deterministic)
        return self.logits(self.decode_states(*inputs, query_positions=query_positions))

    def decode_states(
        self,
        target: Target,
        memory: Memory,
        target_mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> Float[Array, "*B T D"]:
        """The decoder's states, from which `logits` are made.

        Args:
            target: As in `decode`; so are the others.
            memory: As in `decode`.
            target_mask: As in `decode`.
            memory_mask: As in `decode`.
            deterministic: As in `decode`.
            query_positions: As in `decode`.

        Returns:
            `[*B, T, features]`.
        """
        at = standing(query_positions, target_mask, np.shape(target))
        inputs = self._inputs(target, memory, target_mask, memory_mask, deterministic, at)
        return self.decoder(*inputs, deterministic=deterministic, query_positions=at)

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
        check_length(length, self.max_length)
        return self.decoder.new_cache(memory, length, dtype=dtype, memory_valid=memory_valid)

    def with_cache(
        self,
        target: Target,
        cache: Any,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits of the token after each of the next target tokens: rows of `decode`.

        Args:
            target: Ids `[*B, T]` of the T next tokens.
            cache: The tokens before, from `new_cache`.
            memory_mask: Which source tokens are real.
            valid: bool `[*#B, T]`, which target tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.

        Returns:
            `[*B, T, target_vocab]` and the next cache.
        """
        check_batch("target", target, cache, 1)
        at = first_cache(cache).next_positions(np.shape(target)[-1], valid)
        check_tokens("target", target, vocabulary(self.target_embedding), valid)
        x = self._embed(self.target_embedding, target, valid, deterministic, at)
        mask = token_mask("memory_mask", memory_mask, memory_shape(cache))
        options = {"valid": valid, "deterministic": deterministic}
        x, cache = self.decoder.with_cache(x, cache, mask, **options)
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
        deterministic: Flag = None,
        *,
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
            source_positions: ints `[S]` or `[*B, S]`; by default as said.
            target_positions: ints `[T]` or `[*B, T]`; by default as said.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        memory = self.encode(source, source_mask, deterministic, query_positions=source_positions)
        inputs = (target, memory, target_mask, memory_mask, deterministic)
        return self.decode(*inputs, query_positions=target_positions)

    def cross_attention_weights(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Float[Array, "L *B N T S"]:
        """Where the decoder looks while it predicts the token after each target token.

        Args:
            source: As in the call; so are the others.
            target: As in the call.
            source_mask: As in the call.
            target_mask: As in the call.

        Returns:
            `[num_layers, *B, N, T, S]`, without dropout; N is 1 for the mean.
        """
        inputs, options = self._both(source, target, source_mask, target_mask)
        return self.decoder.with_weights(*inputs, **options)[1]

    def cross_attention_stats(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Stats:
        """Entropy, lse and largest logit of the decoder's attention to the source.

        Nothing of size T·S is kept.

        Args:
            source: As in the call; so are the others.
            target: As in the call.
            source_mask: As in the call.
            target_mask: As in the call.

        Returns:
            Statistics `[num_layers, *B, N, T]`, without dropout; N is 1 for the mean.
        """
        inputs, options = self._both(source, target, source_mask, target_mask)
        return self.decoder.with_stats(*inputs, **options)[1]

    def _embed(
        self, embedding: nn.Embed, ids: Any, real: AnyMask, deterministic: Flag, at: Any = None
    ) -> Array:
        x = embedding(embeddable(ids, vocabulary(embedding), real)) * self.features**0.5
        return self.dropout(self.places(x, at), deterministic=deterministic)

    def _inputs(
        self,
        target: Any,
        memory: Any,
        target_mask: AnyMask,
        memory_mask: AnyMask,
        deterministic: Flag,
        at: Any = None,
    ) -> tuple[Any, ...]:
        mask = token_mask("target_mask", target_mask, np.shape(target))
        check_tokens("target", target, vocabulary(self.target_embedding), mask)
        x = self._embed(self.target_embedding, target, target_mask, deterministic, at)
        return x, memory, mask, token_mask("memory_mask", memory_mask, np.shape(memory)[:-1])

    def _both(
        self, source: Any, target: Any, source_mask: AnyMask, target_mask: AnyMask
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        memory = self.encode(source, source_mask, True)
        at = standing(None, target_mask, np.shape(target))
        inputs = self._inputs(target, memory, target_mask, memory_mask, True, at)
        return inputs, {"deterministic": True, "query_positions": at}
