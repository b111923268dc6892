"""A layer of a decoder: causal attention to itself, attention to a memory, and a network."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Memory,
    cast,
    check_choice,
    check_width,
    combine,
)
from attention_jax._modules.caches import DecoderCache, check_batch
from attention_jax._modules.flags import Flag
from attention_jax.linen.layers import Layer
from attention_jax.linen.scores import AnyScore, check_score
from attention_jax.softmax import Stats

Extra = TypeVar("Extra")
Look = Callable[[Array, Array, Any], tuple[Array, Extra]]


class TransformerDecoderLayer(Layer):
    """Causal self-attention, attention to a memory, and a network, each with a way around it.

        post-norm:  x = LayerNorm(x + f(x))      for f = self-attention, attention to the memory,
        pre-norm:   x = x + f(LayerNorm(x))      network, in this order

    Self-attention is causal; attention to the memory is not.

    Args:
        num_heads: N, the number of heads.
        in_features: D, width of input, memory and output.
        mlp_features: Width of the network's hidden layer.
        cross_score: The score of attention to the memory.
        cross_attention: "attention", or "mean": the mean of the memory's valid states in its place,
            which shows what attention is worth (see `MeanAttention`).
        **options: As in `TransformerEncoderLayer`; the mask is for self-attention, besides the
            causal one.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), a name is unknown, or a
            `cross_score` is given to a mean, which has none.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerDecoderLayer, additive
        >>> layer = TransformerDecoderLayer(2, 8, 16, cross_score=additive(4))
        >>> x, memory = jnp.ones((2, 3, 8)), jnp.ones((2, 5, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x, memory), x, memory).shape
        (2, 3, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1, §3.2.3.
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

    def setup(self) -> None:
        """The parts."""
        super().setup()
        # Under the name that the field has: a submodule's own name is not its attribute's.
        if self.cross_attention == "mean":
            self.cross = self._mean(self.in_features, name="cross_attention")
        else:
            self.cross = self._attention(
                self.num_heads, self.in_features, self.cross_score, name="cross_attention"
            )
        self.cross_attention_norm = self._layer_norm()

    @nn.nowrap
    def _own_mask(self) -> AnyMask:
        return combine(masks.causal(), self.mask)

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
        """The layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask: a mask object or boolean array
                `[*#B, #N, #T, #T]`, True where a query may see a key.
            memory_mask: For attention to the memory, `[*#B, #N, #T, #S]`.
            deterministic: Whether to leave dropout out; wins over the constructor's flag. By
                position or by name: under `nn.remat` either works, traced or static.
            valid: bool `[*#B, T]`, in a decoding step: which of its tokens are real.
            query_positions: ints `[T]` or `[*B, T]`, where x stands, 0..T-1 by default; a decoding
                step has its own.

        Returns:
            `[*B, T, in_features]`.
        """
        told = {"valid": valid, "query_positions": query_positions}
        look = self._plain_look(memory_mask, deterministic)
        return self._run(x, memory, mask, look, deterministic, **told)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B N T S"]]:
        """The layer, and the weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            query_positions: As in the call.

        Returns:
            The output and `[*B, N, T, S]`; N is 1 for the mean.
        """
        plain = self._plain_look(memory_mask, deterministic)

        def look(query: Array, memory: Array, at: Any) -> tuple[Array, Array]:
            options = {"mask": memory_mask, **self._standing(at)}
            weights = self.cross.attention_weights(query, memory, **options)
            return plain(query, memory, at)[0], weights

        return self._run(x, memory, mask, look, deterministic, query_positions=query_positions)

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
        """The layer, and the statistics of its attention to the memory.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            query_positions: As in the call.

        Returns:
            The output and statistics `[*B, N, T]`; N is 1 for the mean.
        """

        def look(query: Array, memory: Array, at: Any) -> tuple[Array, Stats]:
            options = self._told(memory_mask, deterministic, at)
            return self.cross.with_stats(query, memory, **options)

        return self._run(x, memory, mask, look, deterministic, query_positions=query_positions)

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> DecoderCache:
        """What `with_cache` needs before the first token.

        Args:
            memory: `[*B, S, in_features]`; it is projected here, once.
            length: How many tokens there is room for.
            dtype: What keys and values of the tokens are stored in; None is the layer's, or
                float32.
            memory_valid: bool `[*#B, S]`, which states are real.

        Returns:
            A cache without tokens.
        """
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        memory = jnp.asarray(cast(memory, self.dtype))
        batch = tuple(memory.shape[:-2])
        own = self._empty_cache(self.num_heads, self.in_features, batch, length, dtype)
        return DecoderCache(own, self.cross.remember(memory, valid=memory_valid))

    def with_cache(
        self,
        x: Features,
        cache: DecoderCache,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], DecoderCache]:
        """The layer for the next tokens.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before, and the memory.
            memory_mask: As in the call.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache.own)
        x = jnp.asarray(cast(x, self.dtype))
        at = cache.own.next_positions(x.shape[-2], valid)
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}
        x, own = self._attend_to_cache(x, cache.own, **options)
        norm, options = self.cross_attention_norm, self._told(memory_mask, deterministic, at)
        change = self.cross.recall(self._enter(norm, x), cache.memory, **options)
        x = self._leave(norm, x, change, deterministic)
        return self._feed_forward(x, deterministic), DecoderCache(own, cache.memory)

    @nn.nowrap
    def _standing(self, at: Any) -> dict[str, Any]:
        # A mean has no positions, and is the same wherever its queries stand.
        return {} if self.cross_attention == "mean" or at is None else {"query_positions": at}

    @nn.nowrap
    def _told(self, mask: AnyMask, deterministic: Flag, at: Any) -> dict[str, Any]:
        # A mean has no weights to drop, so it takes no flags.
        flags = {} if self.cross_attention == "mean" else {"deterministic": deterministic}
        return {"mask": mask, **flags, **self._standing(at)}

    @nn.nowrap
    def _plain_look(self, mask: AnyMask, deterministic: Flag) -> Look[None]:
        def look(query: Array, memory: Array, at: Any) -> tuple[Array, None]:
            return self.cross(query, memory, **self._told(mask, deterministic, at)), None

        return look

    def _run(
        self,
        x: Any,
        memory: Any,
        mask: AnyMask,
        look: Look[Extra],
        flag: Flag,
        *,
        valid: Any = None,
        query_positions: Any = None,
    ) -> tuple[Array, Extra]:
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        x, memory = (jnp.asarray(cast(part, self.dtype)) for part in (x, memory))
        at = self._where(x, valid, query_positions)
        told = {"valid": valid, "query_positions": query_positions}
        x = self._attend_to_self(x, mask, flag, **told)
        norm = self.cross_attention_norm
        change, extra = look(self._enter(norm, x), memory, at)
        x = self._leave(norm, x, change, flag)
        return self._feed_forward(x, flag), extra
