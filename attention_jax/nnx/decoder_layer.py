"""A layer of a decoder: causal attention to itself, attention to a memory, and a network."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
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
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.layers import Extra, Layer
from attention_jax.nnx.mean import MeanAttention
from attention_jax.nnx.parts import Parts, check_options
from attention_jax.nnx.randomness import AnyRngs
from attention_jax.nnx.scores import AnyScore
from attention_jax.softmax import Stats

Look = Callable[[Array, Array], tuple[Array, Extra]]


class TransformerDecoderLayer(Layer):
    """Causal self-attention, attention to a memory, and a network, each with a way around it.

        post-norm:  x = LayerNorm(x + f(x))      for f = self-attention, attention to the memory,
        pre-norm:   x = x + f(LayerNorm(x))      network, in this order

    Self-attention is causal; attention to the memory is not.

    Args:
        num_heads: N, the number of heads.
        in_features: D, width of input, memory and output.
        mlp_features: Width of the network's hidden layer.
        norm: "post" as in the original, or "pre".
        score: The score of self-attention, as in `MultiHeadAttention`.
        cross_score: The score of attention to the memory.
        cross_attention: "attention", or "mean": the mean of the memory's valid states in its place,
            which shows what attention is worth (see `MeanAttention`).
        mask: A mask that holds in every call, for self-attention, besides the causal one.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: As in `TransformerEncoderLayer`.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), a name is unknown, or a
            `cross_score` is given to a mean, which has none.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerDecoderLayer, additive
        >>> layer = TransformerDecoderLayer(2, 8, 16, cross_score=additive(4), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 8)), jnp.ones((2, 5, 8))).shape
        (2, 3, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1, §3.2.3.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        score: AnyScore = None,
        cross_score: AnyScore = None,
        cross_attention: str = "attention",
        mask: AnyMask = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_options(self, rngs, options)
        parts = Parts(
            num_heads=num_heads,
            in_features=in_features,
            mlp_features=mlp_features,
            rngs=rngs,
            **options,
        )
        super().__init__(norm, score, combine(masks.causal(), mask), parts)
        self.cross_attention: MultiHeadAttention | MeanAttention
        if check_choice("cross_attention", cross_attention, "attention", "mean") == "mean":
            if cross_score is not None:
                raise ValueError('cross_attention="mean" has no score: leave cross_score out')
            self.cross_attention = parts.mean()
        else:
            self.cross_attention = parts.scored_attention(cross_score)
        self.cross_attention_norm = parts.layer_norm()

    def __call__(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T D"]:
        """The layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask: a mask object or boolean array
                `[*#B, #N, #T, #T]`, True where a query may see a key.
            memory_mask: For attention to the memory, `[*#B, #N, #T, #S]`.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layer's own streams.
            query_positions: ints `[T]` or `[*B, T]`, where x stands, 0..T-1 by default.

        Returns:
            `[*B, T, in_features]`.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = query_positions

        def look(query: Array, memory: Array) -> tuple[Array, None]:
            return self.cross_attention(query, memory, **self._cross(memory_mask, flags, at)), None

        return self._run(x, memory, mask, look, flags, at)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B N T S"]]:
        """The layer, and the weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.
            query_positions: As in the call.

        Returns:
            The output and `[*B, N, T, S]`; N is 1 for the mean.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = query_positions

        def look(query: Array, memory: Array) -> tuple[Array, Array]:
            options = {"mask": memory_mask, **self._standing(at)}
            weights = self.cross_attention.attention_weights(query, memory, **options)
            return self.cross_attention(
                query, memory, **self._cross(memory_mask, flags, at)
            ), weights

        return self._run(x, memory, mask, look, flags, at)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The layer, and the statistics of its attention to the memory.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.
            query_positions: As in the call.

        Returns:
            The output and statistics `[*B, N, T]`; N is 1 for the mean.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = query_positions

        def look(query: Array, memory: Array) -> tuple[Array, Stats]:
            return self.cross_attention.with_stats(
                query, memory, **self._cross(memory_mask, flags, at)
            )

        return self._run(x, memory, mask, look, flags, at)

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
        own = self.self_attention.new_cache(tuple(memory.shape[:-2]), length, dtype=dtype)
        return DecoderCache(own, self.cross_attention.remember(memory, valid=memory_valid))

    def with_cache(
        self,
        x: Features,
        cache: DecoderCache,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], DecoderCache]:
        """The layer for the next tokens.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before, and the memory.
            memory_mask: As in the call.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache.own)
        flags = {"deterministic": deterministic, "rngs": rngs}
        x = jnp.asarray(cast(x, self.dtype))
        at = cache.own.next_positions(x.shape[-2], valid)
        x, own = self._attend_to_cache(x, cache.own, valid=valid, mask=mask, **flags)
        options = self._cross(memory_mask, flags, at)

        def look(query: Array) -> tuple[Array, None]:
            return self.cross_attention.recall(query, cache.memory, **options), None

        x, _ = self._around(self.cross_attention_norm, x, look, **flags)
        return self._feed_forward(x, **flags), DecoderCache(own, cache.memory)

    def _standing(self, at: Any) -> dict[str, Any]:
        # A mean has no positions, and is the same wherever its queries stand.
        mean = isinstance(self.cross_attention, MeanAttention)
        return {} if mean else {"query_positions": at}

    def _cross(self, mask: AnyMask, flags: dict[str, Any], at: Any) -> dict[str, Any]:
        # A mean has no weights to drop, so it takes no flags.
        flags = {} if isinstance(self.cross_attention, MeanAttention) else flags
        return {"mask": mask, **flags, **self._standing(at)}

    def _run(
        self,
        x: Any,
        memory: Any,
        mask: AnyMask,
        look: Look[Extra],
        flags: dict[str, Any],
        at: Any,
    ) -> tuple[Array, Extra]:
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        x, memory = (jnp.asarray(cast(part, self.dtype)) for part in (x, memory))
        x = self._attend_to_self(x, mask, query_positions=at, **flags)
        x, extra = self._around(
            self.cross_attention_norm, x, lambda query: look(query, memory), **flags
        )
        return self._feed_forward(x, **flags), extra
