"""The Transformer decoder layer."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax.layers.arguments import (
    AnyMask,
    Features,
    Memory,
    check_choice,
    check_width,
    combine,
)
from attention_jax.layers.body import settings
from attention_jax.layers.caches import DecoderCache, check_batch
from attention_jax.layers.construction import Construction
from attention_jax.layers.mean import MeanAttention
from attention_jax.layers.recipes import AnyScore, check_score
from attention_jax.layers.training import Flag
from attention_jax.layers.transformer_layer import TransformerLayer, scored_attention
from attention_jax.softmax import Stats

Extra = TypeVar("Extra")


def check_cross_attention(given: Any) -> None:
    """Checks the `cross_attention` and `cross_score` of a layer, stack or model."""
    check_choice("cross_attention", given.cross_attention, "attention", "mean")
    check_score(given.cross_score, "cross_score")
    if given.cross_attention == "mean" and given.cross_score is not None:
        raise ValueError('cross_attention="mean" has no score: leave cross_score out')


@settings
class TransformerDecoderLayer(TransformerLayer):
    """Causal self-attention, cross-attention to a memory, and a network, with residual connections.

        post-norm:  x = LayerNorm(x + f(x))      for f = self-attention, attention to the memory,
        pre-norm:   x = x + f(LayerNorm(x))      network, in this order

    Self-attention is causal; attention to the memory is not.

    Args:
        in_features: D, width of input, memory and output.
        mask: A mask object or boolean array for self-attention in every call, combined with the
            causal mask.
        cross_score: The score of attention to the memory.
        cross_attention: "attention", or "mean": the uniform average of the memory's valid states,
            as a baseline (see `MeanAttention`).

    Raises:
        ValueError: If sizes do not fit, a rate is outside [0, 1), a name is unknown, or
            `cross_score` is given with `cross_attention="mean"`.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1, §3.2.3.
    """

    _: dataclasses.KW_ONLY
    cross_score: AnyScore = None
    cross_attention: Any = "attention"

    _passed_on = (*TransformerLayer._passed_on, "cross_score", "cross_attention")

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_cross_attention(given)

    def _build(self, make: Construction) -> None:
        super()._build(make)
        given = make.given
        if given.cross_attention == "mean":
            make.keep("cross_attention", make.layer(MeanAttention))
        else:
            make.keep("cross_attention", scored_attention(make, given.cross_score))
        self.cross_attention_norm = make.layer_norm(self.in_features)

    def _self_mask(self, mask: AnyMask) -> AnyMask:
        return combine(masks.causal(), mask)

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
        **random: Any,
    ) -> Float[Array, "*B T D"]:
        """Applies the layer.

        Args:
            memory: `[*B, S, in_features]`.
            mask: For self-attention, combined with the causal mask: a mask object or boolean array
                `[*#B, #N, #T, #T]`, True where a query may attend to a key.
            memory_mask: For attention to the memory, `[*#B, #N, #T, #S]`.

        Returns:
            `[*B, T, in_features]`.
        """
        flags = (deterministic, random)
        call_options = {"valid": valid, "query_positions": query_positions}

        def attend(query: Array, memory: Array, options: Any) -> tuple[Array, None]:
            return self._part("cross_attention")(query, memory, **options), None

        return self._run(attend, x, memory, mask, memory_mask, *flags, **call_options)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B N T S"]]:
        """Applies the layer and returns the weights of cross-attention, before dropout.

        Returns:
            The output and `[*B, N, T, S]`; N is 1 for the mean.
        """

        def attend(query: Array, memory: Array, options: Any) -> tuple[Array, Array]:
            cross = self._part("cross_attention")
            named = ("mask", "query_positions")
            call_options = {name: options[name] for name in named if name in options}
            return cross(query, memory, **options), cross.attention_weights(
                query, memory, **call_options
            )

        flags = (deterministic, random)
        return self._run(
            attend, x, memory, mask, memory_mask, *flags, query_positions=query_positions
        )

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """Applies the layer and returns the statistics of cross-attention.

        Returns:
            The output and statistics `[*B, N, T]`; N is 1 for the mean.
        """

        def attend(query: Array, memory: Array, options: Any) -> tuple[Array, Stats]:
            return self._part("cross_attention").with_stats(query, memory, **options)

        flags = (deterministic, random)
        return self._run(
            attend, x, memory, mask, memory_mask, *flags, query_positions=query_positions
        )

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> DecoderCache:
        """An empty cache for `with_cache`, with the projected memory.

        Args:
            length: The number of tokens that it can hold.
            dtype: The storage dtype of the tokens' keys and values; None is the layer's, or
                float32.
            memory_valid: bool `[*#B, S]`, which states of the memory are real.
        """
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        memory = self._cast(memory)
        batch = tuple(memory.shape[:-2])
        attention = self._unbound("self_attention", self._build_self_attention)
        own = attention.new_cache(batch, length, dtype=dtype)
        return DecoderCache(
            own, self._part("cross_attention").new_memory_cache(memory, valid=memory_valid)
        )

    def with_cache(
        self,
        x: Features,
        cache: DecoderCache,
        memory_mask: AnyMask = None,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T D"], DecoderCache]:
        """Applies the layer to the next tokens.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The previous tokens and the memory, from `new_cache`.
            mask: For self-attention, besides causality; the keys of an array are the cache's slots.

        Returns:
            `[*B, T, in_features]` and the updated cache.
        """
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache.own)
        x, flags = self._cast(x), (deterministic, random)
        at = cache.own.next_positions(x.shape[-2], valid)
        call_options = {"cache": cache.own, "valid": valid, "mask": mask}
        x, own = self._attend_to_self(x, *flags, **call_options)
        options = self._cross_options(memory_mask, at, *flags)

        def attend(query: Array) -> tuple[Array, None]:
            return self._part("cross_attention").with_memory_cache(
                query, cache.memory, **options
            ), None

        x, _ = self._residual(self.cross_attention_norm, x, attend, *flags)
        return self._feed_forward(x, *flags), DecoderCache(own, cache.memory)

    def _cross_options(self, mask: AnyMask, at: Any, deterministic: Flag, random: Any) -> Any:
        """The arguments of cross-attention; a mean has neither positions nor dropout."""
        if isinstance(self._part("cross_attention"), MeanAttention):
            return {"mask": mask}
        at = {} if at is None else {"query_positions": at}
        return {"mask": mask, "deterministic": deterministic, **at, **random}

    def _run(
        self,
        attend: Callable[[Array, Array, Any], tuple[Array, Extra]],
        x: Any,
        memory: Any,
        mask: AnyMask,
        memory_mask: AnyMask,
        deterministic: Flag,
        random: Any,
        **call_options: Any,
    ) -> tuple[Array, Extra]:
        """Applies the layer with `attend(query, memory, options)` as cross-attention."""
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        x, memory, flags = self._cast(x), self._cast(memory), (deterministic, random)
        at = call_options["query_positions"]
        if self.decode and (cache := self.self_attention._stored_cache()) is not None:
            at = cache.next_positions(x.shape[-2], call_options.get("valid"))
        x, _ = self._attend_to_self(x, *flags, mask=mask, **call_options)
        options = self._cross_options(memory_mask, at, *flags)
        x, extra = self._residual(
            self.cross_attention_norm, x, lambda query: attend(query, memory, options), *flags
        )
        return self._feed_forward(x, *flags), extra
