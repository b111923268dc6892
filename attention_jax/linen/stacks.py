"""Layers on top of one another: encoder and decoder, from features to features."""

import dataclasses
from typing import Any

import flax.linen as nn
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Memory,
    check_choice,
)
from attention_jax._modules.caches import DecoderCache, check_batch
from attention_jax._modules.flags import Flag
from attention_jax.cache import KVCache
from attention_jax.linen.decoder_layer import TransformerDecoderLayer
from attention_jax.linen.layers import TransformerEncoderLayer
from attention_jax.linen.scores import AnyScore, check_score
from attention_jax.linen.stacking import LayerStack, stacked
from attention_jax.softmax import Stats


class TransformerEncoder(LayerStack):
    """Encoder layers on top of one another: every state comes to know the whole source.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        scan_layers: Whether the layers are scanned and not written out: one of them is compiled,
            and each variable of `layers` has an axis of layers in front. Without dropout the
            numbers are the same.
        remat: Whether the backward pass recomputes a layer from its input: True recomputes all of
            it; a policy of `jax.checkpoint_policies`, or its name, says what is kept.
        decode: Whether calls bring the next tokens only, as in `MultiHeadAttention`.
        **options: As in `TransformerEncoderLayer`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerEncoder
        >>> encoder, x = TransformerEncoder(2, 2, 8, 16, norm="pre"), jnp.ones((3, 5, 8))
        >>> encoder.apply(encoder.init(jax.random.key(0), x), x).shape
        (3, 5, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    @nn.nowrap
    def _layer(self) -> TransformerEncoderLayer:
        return TransformerEncoderLayer(*self._sizes(), decode=self.decode, **self._shared())

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        valid: Any = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The states after the last layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            valid: bool `[*#B, S]`, in a decoding step: which of its tokens are real.
            query_positions: ints `[S]` or `[*B, S]`, 0..S-1 by default; a decoding step has its
                own.

        Returns:
            `[*B, S, in_features]`.
        """
        told = {"valid": valid, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None) -> tuple[Array, None]:
            return layer(x, mask, deterministic, **told), None

        return self._finish(self._each(call, self._enter(x))[0])

    @nn.nowrap
    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> Any:
        """What `with_cache` needs before the first token: each layer's cache.

        Args:
            batch: `*B`.
            length: How many tokens there is room for.
            dtype: What keys and values are stored in; None is the layers', or float32.
            rolling: Whether it keeps the latest tokens, as in `MultiHeadAttention.new_cache`.
        """
        sizes = (self.num_heads, self.in_features)
        # Each has buffers of its own, so that all can be donated.
        every = [
            self._empty_cache(*sizes, batch, length, dtype, rolling=rolling)
            for _ in range(self.num_layers)
        ]
        return stacked(every) if self.scan_layers else tuple(every)

    def with_cache(
        self,
        x: Features,
        cache: Any,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """The layers for the next tokens, causal: the stack of a decoder-only model.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}

        def call(layer: Any, x: Any, own: KVCache) -> tuple[Array, KVCache]:
            return layer.with_cache(x, own, **options)

        check_batch("x", x, cache)
        x, cache = self._each(call, self._enter(x), cache)
        return self._finish(x), cache


class TransformerDecoder(LayerStack):
    """Decoder layers on top of one another: causal on itself, and seeing a memory in every layer.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input, memory and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        scan_layers: Whether the layers are scanned and not written out: one of them is compiled,
            and each variable of `layers` has an axis of layers in front. Without dropout the
            numbers are the same.
        remat: Whether the backward pass recomputes a layer from its input: True recomputes all of
            it; a policy of `jax.checkpoint_policies`, or its name, says what is kept.
        decode: Whether calls bring the next tokens only, as in `MultiHeadAttention`.
        cross_score: As in `TransformerDecoderLayer`.
        cross_attention: As in `TransformerDecoderLayer`.
        **options: As in `TransformerDecoderLayer`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerDecoder
        >>> decoder, x, memory = TransformerDecoder(2, 2, 8, 16), jnp.ones((4, 8)), jnp.ones((5, 8))
        >>> decoder.apply(decoder.init(jax.random.key(0), x, memory), x, memory).shape
        (4, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    _: dataclasses.KW_ONLY
    cross_score: AnyScore = None
    cross_attention: str = "attention"

    def __post_init__(self) -> None:
        check_choice("cross_attention", self.cross_attention, "attention", "mean")
        check_score(self.cross_score)
        if self.cross_attention == "mean" and self.cross_score is not None:
            raise ValueError('cross_attention="mean" has no score: leave cross_score out')
        super().__post_init__()

    @nn.nowrap
    def _layer(self) -> TransformerDecoderLayer:
        cross = self._take("cross_score", "cross_attention", "decode")
        return TransformerDecoderLayer(*self._sizes(), **cross, **self._shared())

    def __call__(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        valid: Any = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T D"]:
        """The states after the last layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask.
            memory_mask: For attention to the memory.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            valid: bool `[*#B, T]`, in a decoding step: which of its tokens are real.
            query_positions: ints `[T]` or `[*B, T]`, where x stands, 0..T-1 by default; a decoding
                step has its own.

        Returns:
            `[*B, T, in_features]`.
        """
        told = {"valid": valid, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None) -> tuple[Array, None]:
            return layer(x, memory, mask, memory_mask, deterministic, **told), None

        return self._finish(self._each(call, self._enter(x))[0])

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"]]:
        """The states, and every layer's weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            query_positions: As in the call.

        Returns:
            The states and `[num_layers, *B, N, T, S]`.
        """

        def call(layer: Any, x: Any, item: None) -> tuple[Array, Any]:
            given = (x, memory, mask, memory_mask, deterministic)
            return layer.with_weights(*given, query_positions=query_positions)

        x, every = self._each(call, self._enter(x))
        return self._finish(x), self._stack(every)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The states, and the statistics of every layer's attention to the memory.

        Nothing of size T·S is kept.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            query_positions: As in the call.

        Returns:
            The states and statistics `[num_layers, *B, N, T]`.
        """

        def call(layer: Any, x: Any, item: None) -> tuple[Array, Any]:
            given = (x, memory, mask, memory_mask, deterministic)
            return layer.with_stats(*given, query_positions=query_positions)

        x, every = self._each(call, self._enter(x))
        return self._finish(x), self._stack(every)

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> Any:
        """What `with_cache` needs before the first token: each layer's keys, values and memory.

        Args:
            memory: `[*B, S, in_features]`.
            length: How many tokens there is room for.
            dtype: What keys and values of the tokens are stored in.
            memory_valid: bool `[*#B, S]`, which states are real.
        """

        def call(layer: Any, carry: None, item: None) -> tuple[None, DecoderCache]:
            return None, layer.new_cache(memory, length, dtype=dtype, memory_valid=memory_valid)

        return self._each(call, None)[1]

    def with_cache(
        self,
        x: Features,
        cache: Any,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """The layers for the next tokens.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before and the memory, from `new_cache`.
            memory_mask: For attention to the memory.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}

        def call(layer: Any, x: Any, own: DecoderCache) -> tuple[Array, DecoderCache]:
            return layer.with_cache(x, own, memory_mask, **options)

        check_batch("x", x, cache)
        x, cache = self._each(call, self._enter(x), cache)
        return self._finish(x), cache
