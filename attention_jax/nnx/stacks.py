"""Layers on top of one another: encoder and decoder, from features to features."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import AnyMask, Features, Memory
from attention_jax._modules.caches import DecoderCache, check_batch
from attention_jax._modules.flags import Flag
from attention_jax._modules.shield import shielded
from attention_jax.cache import KVCache
from attention_jax.nnx.decoder_layer import TransformerDecoderLayer
from attention_jax.nnx.layers import TransformerEncoderLayer
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.parts import check_options
from attention_jax.nnx.randomness import AnyRngs
from attention_jax.nnx.stacking import LayerStack, Remat
from attention_jax.softmax import Stats


def _last_norm(norm: str, features: int, options: dict[str, Any], rngs: nnx.Rngs) -> Any:
    """Pre-norm layers leave their sum as it is, so the stack ends in a norm; post-norm has it."""
    if norm != "pre":
        return nnx.data(None)
    dtypes = {name: options[name] for name in ("dtype", "param_dtype") if name in options}
    return LayerNorm(features, rngs=rngs, **dtypes)


class TransformerEncoder(LayerStack):
    """Encoder layers on top of one another: every state comes to know the whole source.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        scan_layers: Whether the layers are scanned and not written out: one of them is compiled,
            and each variable of `layers` has an axis of layers in front. The numbers are the same.
        remat: Whether the backward pass recomputes a layer from its input: True recomputes all of
            it; a policy of `jax.checkpoint_policies`, or its name, says what is kept.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: As in `TransformerEncoderLayer`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerEncoder
        >>> encoder = TransformerEncoder(2, 2, 8, 16, norm="pre", rngs=nnx.Rngs(0))
        >>> encoder(jnp.ones((3, 5, 8))).shape
        (3, 5, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        scan_layers: bool = False,
        remat: Remat = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_options(self, rngs, options, "score", "mask")
        self.in_features, self.dtype = in_features, options.get("dtype")

        def make() -> TransformerEncoderLayer:
            sizes = (num_heads, in_features, mlp_features)
            return TransformerEncoderLayer(*sizes, norm=norm, rngs=rngs, **options)

        self._build(make, num_layers, scan_layers=scan_layers, remat=remat)
        self.norm: LayerNorm | None = _last_norm(norm, in_features, options, rngs)

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The states after the last layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            query_positions: ints `[S]` or `[*B, S]`, 0..S-1 by default.

        Returns:
            `[*B, S, in_features]`.
        """
        options = {"deterministic": deterministic, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None, rngs: AnyRngs) -> tuple[Array, None]:
            return layer(x, mask, rngs=rngs, **options), None

        return self._finish(self._each(call, self._enter(x), rngs=rngs)[0])

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

        def call(layer: Any, carry: None, item: None, rngs: AnyRngs) -> tuple[None, KVCache]:
            return None, layer.new_cache(batch, length, dtype=dtype, rolling=rolling)

        return self._each(call, None)[1]

    def with_cache(
        self,
        x: Features,
        cache: Any,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """The layers for the next tokens, causal: the stack of a decoder-only model.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}

        def call(layer: Any, x: Any, own: KVCache, rngs: AnyRngs) -> tuple[Array, KVCache]:
            return layer.with_cache(x, own, rngs=rngs, **options)

        check_batch("x", x, cache)
        x, cache = self._each(call, self._enter(x), cache, rngs)
        return self._finish(x), cache

    def _finish(self, x: Any) -> Array:
        return jnp.asarray(x) if self.norm is None else shielded(self.norm, x)


class TransformerDecoder(LayerStack):
    """Decoder layers on top of one another: causal on itself, and seeing a memory in every layer.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input, memory and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        scan_layers: Whether the layers are scanned and not written out: one of them is compiled,
            and each variable of `layers` has an axis of layers in front. The numbers are the same.
        remat: Whether the backward pass recomputes a layer from its input: True recomputes all of
            it; a policy of `jax.checkpoint_policies`, or its name, says what is kept.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: As in `TransformerDecoderLayer`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerDecoder
        >>> decoder = TransformerDecoder(2, 2, 8, 16, rngs=nnx.Rngs(0))
        >>> decoder(jnp.ones((3, 4, 8)), jnp.ones((3, 5, 8))).shape
        (3, 4, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        scan_layers: bool = False,
        remat: Remat = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        cross = ("cross_score", "cross_attention")
        check_options(self, rngs, options, "score", "mask", *cross)
        self.in_features, self.dtype = in_features, options.get("dtype")

        def make() -> TransformerDecoderLayer:
            sizes = (num_heads, in_features, mlp_features)
            return TransformerDecoderLayer(*sizes, norm=norm, rngs=rngs, **options)

        self._build(make, num_layers, scan_layers=scan_layers, remat=remat)
        self.norm: LayerNorm | None = _last_norm(norm, in_features, options, rngs)

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
        """The states after the last layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask.
            memory_mask: For attention to the memory.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            query_positions: ints `[T]` or `[*B, T]`, where x stands, 0..T-1 by default.

        Returns:
            `[*B, T, in_features]`.
        """
        options = {"deterministic": deterministic, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None, rngs: AnyRngs) -> tuple[Array, None]:
            return layer(x, memory, mask, memory_mask, rngs=rngs, **options), None

        return self._finish(self._each(call, self._enter(x), rngs=rngs)[0])

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
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"]]:
        """The states, and every layer's weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.
            query_positions: As in the call.

        Returns:
            The states and `[num_layers, *B, N, T, S]`.
        """
        options = {"deterministic": deterministic, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None, rngs: AnyRngs) -> tuple[Array, Any]:
            return layer.with_weights(x, memory, mask, memory_mask, rngs=rngs, **options)

        x, every = self._each(call, self._enter(x), rngs=rngs)
        return self._finish(x), self._stack(every)

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
        """The states, and the statistics of every layer's attention to the memory.

        Nothing of size T·S is kept.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.
            query_positions: As in the call.

        Returns:
            The states and statistics `[num_layers, *B, N, T]`.
        """
        options = {"deterministic": deterministic, "query_positions": query_positions}

        def call(layer: Any, x: Any, item: None, rngs: AnyRngs) -> tuple[Array, Any]:
            return layer.with_stats(x, memory, mask, memory_mask, rngs=rngs, **options)

        x, every = self._each(call, self._enter(x), rngs=rngs)
        return self._finish(x), self._stack(every)

    def new_cache(
        self, memory: Memory, length: int, *, dtype: Any = None, memory_valid: Any = None
    ) -> Any:
        """What `with_cache` needs before the first token: each layer's `DecoderCache`.

        Args:
            memory: `[*B, S, in_features]`.
            length: How many tokens there is room for.
            dtype: What keys and values of the tokens are stored in.
            memory_valid: bool `[*#B, S]`, which states are real.
        """

        def call(layer: Any, carry: None, item: None, rngs: AnyRngs) -> tuple[None, DecoderCache]:
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
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """The layers for the next tokens.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before and the memory, from `new_cache`.
            memory_mask: For attention to the memory.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}

        def call(
            layer: Any, x: Any, own: DecoderCache, rngs: AnyRngs
        ) -> tuple[Array, DecoderCache]:
            return layer.with_cache(x, own, memory_mask, rngs=rngs, **options)

        check_batch("x", x, cache)
        x, cache = self._each(call, self._enter(x), cache, rngs)
        return self._finish(x), cache

    def _finish(self, x: Any) -> Array:
        return jnp.asarray(x) if self.norm is None else shielded(self.norm, x)
