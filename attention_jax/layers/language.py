"""The decoder-only Transformer language model."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array, Batch
from attention_jax.layers import arguments
from attention_jax.layers.arguments import (
    AnyMask,
    Features,
    Target,
    check_tokens,
    combine,
    vocabulary,
)
from attention_jax.layers.body import settings
from attention_jax.layers.caches import check_batch, first_cache
from attention_jax.layers.construction import Construction
from attention_jax.layers.embedding import check_length
from attention_jax.layers.stacks import TransformerEncoder
from attention_jax.layers.token_model import TokenModel
from attention_jax.layers.training import Flag


@settings
class TransformerLM(TokenModel):
    """Decoder-only Transformer: a stack of causal self-attention and feed-forward layers.

        x = √D · embed(token) + position;   logits = W_vocab layers(x)

    Row t of the logits predicts token t + 1 and depends on tokens 0..t.

    Args:
        num_layers: The number of layers.
        vocab: Number of tokens.
        norm: "pre", or "post".
        mask: A mask combined with the causal mask, such as a window.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    References:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", §3.1.
    """

    vocab: int
    _: dataclasses.KW_ONLY
    norm: Any = "pre"

    _counts = (*TokenModel._counts, "vocab")
    _first = "_build_decoder"

    def _build(self, make: Construction) -> None:
        self.embedding = self._build_embedding(make, self.vocab)
        self._build_positions(make)
        self.decoder = self._build_decoder(make)
        self._build_ends(make, self.vocab)

    def _build_decoder(self, make: Construction) -> Any:
        mask = combine(masks.causal(), make.given.mask)
        return self._build_stack(make, TransformerEncoder, mask=mask)

    def __call__(
        self,
        tokens: Target,
        token_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
        **random: Any,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the next token at each position.

        Args:
            tokens: Ids `[*B, T]`.
            token_mask: Which tokens are real: a boolean array `[*B, T]`, such as `tokens != pad`,
                padded on either side: a token's position is the number of real tokens before it; or
                a mask object, such as `masks.padding(lengths)`, with positions 0..T-1.
            query_positions: ints `[T]` or `[*B, T]`; by default 0..T-1, or as under `token_mask`.

        Returns:
            `[*B, T, vocab]`.
        """
        shape, flags = np.shape(tokens), (deterministic, random)
        at = arguments.token_positions(query_positions, token_mask, shape)
        mask = arguments.token_mask("token_mask", token_mask, shape)
        check_tokens("tokens", tokens, vocabulary(self.embedding), mask)
        x = self._embed(self.embedding, tokens, token_mask, at, *flags)
        return self.logits(self.decoder(x, mask, deterministic, query_positions=at, **random))

    def new_cache(
        self, batch: Batch, length: int, *, dtype: Any = None, rolling: bool = False
    ) -> Any:
        """The layers' empty caches for `with_cache`; it needs no variables.

        Args:
            batch: `*B`.
            length: The number of tokens that it can hold.
            dtype: The storage dtype of keys and values; None is the layers', or float32.
            rolling: Whether it keeps only the latest tokens, as in `MultiHeadAttention.new_cache`.

        Raises:
            ValueError: If there are fewer learned positions.
        """
        if not rolling:
            check_length(length, self.max_length)
        decoder = self._unbound("decoder", self._build_decoder)
        return decoder.new_cache(batch, length, dtype=dtype, rolling=rolling)

    def with_cache(
        self,
        tokens: Target,
        cache: Any,
        *,
        valid: Any = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits for the next tokens over a cache: rows of the full pass.

        Args:
            tokens: Ids `[*B, T]` of the T next tokens: a prompt, a part of one, or one token.
            cache: The previous tokens, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.

        Returns:
            `[*B, T, vocab]` and the updated cache.
        """
        check_batch("tokens", tokens, cache, 1)
        at = first_cache(cache).next_positions(np.shape(tokens)[-1], valid)
        check_tokens("tokens", tokens, vocabulary(self.embedding), valid)
        x = self._embed(self.embedding, tokens, valid, at, deterministic, random)
        call_options = {"valid": valid, "deterministic": deterministic, **random}
        x, cache = self.decoder.with_cache(x, cache, **call_options)
        return self.logits(x), cache

    def logits(self, states: Features) -> Float[Array, "*B T vocab"]:
        """Logits of the last layer's states.

        Args:
            states: The last layer's states `[*B, T, features]`.

        Returns:
            `[*B, T, vocab]`, in the states' dtype.
        """
        return self._logits(self.embedding, states)
