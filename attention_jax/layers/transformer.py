"""The encoder–decoder of "Attention Is All You Need"."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers.arguments import (
    AnyMask,
    Features,
    Memory,
    Source,
    Target,
    check_tokens,
    token_mask,
    token_positions,
    vocabulary,
)
from attention_jax.layers.body import arguments_of, settings
from attention_jax.layers.caches import check_batch, first_cache, memory_shape
from attention_jax.layers.construction import Construction
from attention_jax.layers.decoder_layer import check_cross_attention
from attention_jax.layers.embedding import check_length
from attention_jax.layers.recipes import AnyScore
from attention_jax.layers.stacks import TransformerDecoder, TransformerEncoder
from attention_jax.layers.token_model import TokenModel
from attention_jax.layers.training import Flag
from attention_jax.softmax import Stats


@settings
class Transformer(TokenModel):
    """Encoder–decoder Transformer, from token ids to logits of the next target token.

        x = √D · embed(token) + sinusoidal(position)
        memory = encoder(x_source);   logits = W_vocab decoder(x_target, memory)

    Masks mark the real tokens. They are boolean arrays of the ids' shape (True is a real token), or
    mask objects such as `attention_jax.masks.padding(lengths)`. The states of padded positions are
    finite and visible to no other position. Default positions are 0, 1, …; with a boolean array
    only real tokens are counted, so that padding may be on either side.

    Args:
        num_layers: Layers of the encoder, and of the decoder.
        source_vocab: Number of source tokens.
        target_vocab: Number of target tokens.
        mask: A mask object or boolean array for the self-attention of encoder and decoder in every
            call.
        cross_score: The score of the decoder's cross-attention.
        cross_attention: "attention", or "mean": the decoder uses only the mean of the valid encoder
            states.
        share_embedding: Whether source and target share one embedding, as in the original; the
            vocabularies must then be of equal size.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.
        Press, Wolf 2017, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859
        (`tie_output`).
    """

    source_vocab: int
    target_vocab: int
    _: dataclasses.KW_ONLY
    cross_score: AnyScore = None
    cross_attention: str = "attention"
    share_embedding: bool = False

    _counts = (*TokenModel._counts, "source_vocab", "target_vocab")
    _first = "_build_encoder"
    _passed_on = (*TokenModel._passed_on, "cross_score", "cross_attention")
    _arguments: ClassVar[Mapping[str, str]] = {
        **TokenModel._arguments,
        "memory": "The encoder's states `[*B, S, features]`.",
        "memory_mask": "Which source tokens are real.",
    }

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_cross_attention(given)
        if given.share_embedding and given.source_vocab != given.target_vocab:
            raise ValueError(
                "share_embedding needs vocabularies of one size, got source_vocab "
                f"{given.source_vocab} and target_vocab {given.target_vocab}"
            )

    def _build(self, make: Construction) -> None:
        self._build_positions(make)
        target = source = self._build_embedding(make, self.target_vocab)
        if not self.share_embedding:
            source = self._build_embedding(make, self.source_vocab)
        self.source_embedding, self.target_embedding = source, target
        self.encoder = self._build_encoder(make)
        self.decoder = self._build_stack(make, TransformerDecoder)
        self._build_ends(make, self.target_vocab)

    def _build_encoder(self, make: Construction) -> Any:
        return self._build_stack(make, TransformerEncoder)

    def encode(
        self,
        source: Source,
        source_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
        **random: Any,
    ) -> Float[Array, "*B S D"]:
        """The encoder's states.

        Returns:
            `[*B, S, features]`.
        """
        at = token_positions(query_positions, source_mask, np.shape(source))
        mask = token_mask("source_mask", source_mask, np.shape(source))
        check_tokens("source", source, vocabulary(self.source_embedding), mask)
        flags = (deterministic, random)
        x = self._embed(self.source_embedding, source, source_mask, at, *flags)
        return self.encoder(x, mask, deterministic, query_positions=at, **random)

    def decode_states(
        self,
        target: Target,
        memory: Memory,
        target_mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
        **random: Any,
    ) -> Float[Array, "*B T D"]:
        """The decoder's states, the input of `logits`.

        Returns:
            `[*B, T, features]`.
        """
        given = (target, memory, target_mask, memory_mask)
        inputs, call_options = self._inputs(*given, deterministic, random, query_positions)
        return self.decoder(*inputs, **call_options)

    @arguments_of(decode_states)
    def decode(self, *args: Any, **call_options: Any) -> Float[Array, "*B T vocab"]:
        """Logits of the next token at each target position.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        return self.logits(self.decode_states(*args, **call_options))

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> Any:
        """The layers' empty caches for `with_cache`, with the projected memory.

        Args:
            memory: The encoder's states `[*B, S, features]`; every layer projects them once, here.
            length: The number of tokens that it can hold.
            dtype: The storage dtype of the tokens' keys and values; None is the layers', or
                float32.
            memory_valid: bool `[*#B, S]`, which states are real; or pass a mask in each step.

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
        **random: Any,
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits for the next target tokens over a cache: rows of `decode`.

        Args:
            target: Ids `[*B, T]` of the T next tokens.
            cache: The previous tokens, from `new_cache`.
            valid: bool `[*#B, T]`, which target tokens are real.

        Returns:
            `[*B, T, target_vocab]` and the updated cache.
        """
        check_batch("target", target, cache, 1)
        at = first_cache(cache).next_positions(np.shape(target)[-1], valid)
        check_tokens("target", target, vocabulary(self.target_embedding), valid)
        x = self._embed(self.target_embedding, target, valid, at, deterministic, random)
        mask = token_mask("memory_mask", memory_mask, memory_shape(cache))
        call_options = {"valid": valid, "deterministic": deterministic, **random}
        x, cache = self.decoder.with_cache(x, cache, mask, **call_options)
        return self.logits(x), cache

    def logits(self, states: Features) -> Float[Array, "*B T vocab"]:
        """Logits of the decoder's states.

        Args:
            states: The decoder's states `[*B, T, features]`.

        Returns:
            `[*B, T, target_vocab]`, in the states' dtype.
        """
        return self._logits(self.target_embedding, states)

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
        **random: Any,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the next token at each target position, given the source.

        Args:
            source: Ids `[*B, S]`.
            target: Ids `[*B, T]`, of which the first begins every sentence.
            source_mask: Which source tokens are real.
            target_mask: Which target tokens are real.
            source_positions: ints `[S]` or `[*B, S]`; by default as in the class.
            target_positions: ints `[T]` or `[*B, T]`; by default as in the class.

        Returns:
            `[*B, T, target_vocab]`; row t depends on target tokens 0..t.
        """
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        flags = {"deterministic": deterministic, **random}
        memory = self.encode(source, source_mask, query_positions=source_positions, **flags)
        flags["query_positions"] = target_positions
        return self.decode(target, memory, target_mask, memory_mask, **flags)

    def cross_attention_weights(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Float[Array, "L *B N T S"]:
        """The weights of the decoder's cross-attention.

        Returns:
            `[num_layers, *B, N, T, S]`, without dropout; N is 1 for the mean.
        """
        inputs, call_options = self._evaluation(source, target, source_mask, target_mask)
        return self.decoder.with_weights(*inputs, **call_options)[1]

    def cross_attention_stats(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Stats:
        """Entropy, lse and largest logit of the decoder's cross-attention, in O(T + S) memory.

        Returns:
            Statistics `[num_layers, *B, N, T]`, without dropout; N is 1 for the mean.
        """
        inputs, call_options = self._evaluation(source, target, source_mask, target_mask)
        return self.decoder.with_stats(*inputs, **call_options)[1]

    def _evaluation(
        self, source: Any, target: Any, source_mask: AnyMask, target_mask: AnyMask
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the decoder, without dropout."""
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        memory = self.encode(source, source_mask, True)
        return self._inputs(target, memory, target_mask, memory_mask, True, {}, None)

    def _inputs(
        self,
        target: Any,
        memory: Any,
        target_mask: AnyMask,
        memory_mask: AnyMask,
        deterministic: Flag,
        random: Mapping[str, Any],
        at: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the decoder."""
        at = token_positions(at, target_mask, np.shape(target))
        mask = token_mask("target_mask", target_mask, np.shape(target))
        check_tokens("target", target, vocabulary(self.target_embedding), mask)
        x = self._embed(self.target_embedding, target, target_mask, at, deterministic, random)
        others = token_mask("memory_mask", memory_mask, np.shape(memory)[:-1])
        call_options = {"deterministic": deterministic, "query_positions": at, **random}
        return (x, memory, mask, others), call_options
