"""A layer of an encoder: attention and a feed-forward network, each with a way around it."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Memory,
    cast,
    check_choice,
    check_width,
)
from attention_jax._modules.caches import check_batch
from attention_jax._modules.flags import Flag
from attention_jax._modules.shield import shielded
from attention_jax.cache import KVCache
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.parts import Parts, check_options
from attention_jax.nnx.randomness import AnyRngs
from attention_jax.nnx.scores import AnyScore

Extra = TypeVar("Extra")
Change = Callable[[Array], tuple[Array, Extra]]


def _dropout(options: dict[str, Any]) -> dict[str, Any]:
    """The options that dropout takes."""
    return {name: options[name] for name in ("deterministic", "rngs") if name in options}


class Layer(nnx.Module):
    """What both layers share: self-attention and the network, and the way around each."""

    def __init__(self, norm: str, score: AnyScore, mask: AnyMask, parts: Parts) -> None:
        self.in_features = check_count("in_features", parts.in_features, 1)
        self.norm = check_choice("norm", norm, "post", "pre")
        self.dtype = parts.dtype
        self.self_attention = parts.self_attention(score, mask)
        self.self_attention_norm = parts.layer_norm()
        self.mlp = parts.feed_forward()
        self.mlp_norm = parts.layer_norm()
        self.dropout = parts.dropout(type(self).__name__)

    def _enter(self, norm: LayerNorm, x: Array) -> Array:
        return shielded(norm, x) if self.norm == "pre" else x

    def _leave(self, norm: LayerNorm, x: Array, change: Array, **flags: Any) -> Array:
        x = x + self.dropout(change, **flags)
        return x if self.norm == "pre" else shielded(norm, x)

    def _attend_to_self(self, x: Array, mask: AnyMask, **flags: Any) -> Array:
        def attend(x: Array) -> tuple[Array, None]:
            return self.self_attention(x, mask=mask, **flags), None

        return self._around(self.self_attention_norm, x, attend, **_dropout(flags))[0]

    def _attend_to_cache(self, x: Array, cache: KVCache, **options: Any) -> tuple[Array, KVCache]:
        def attend(x: Array) -> tuple[Array, KVCache]:
            return self.self_attention.with_cache(x, cache, **options)

        return self._around(self.self_attention_norm, x, attend, **_dropout(options))

    def _around(
        self, norm: LayerNorm, x: Array, change: Change[Extra], **flags: Any
    ) -> tuple[Array, Extra]:
        """`x` and a change of it, with the norm where this layer has it."""
        changed, extra = change(self._enter(norm, x))
        return self._leave(norm, x, changed, **flags), extra

    def _feed_forward(self, x: Array, **flags: Any) -> Array:
        change = self.mlp(self._enter(self.mlp_norm, x))
        return self._leave(self.mlp_norm, x, change, **flags)


class TransformerEncoderLayer(Layer):
    """Self-attention and a feed-forward network, each with a residual connection and a LayerNorm.

        post-norm:  x = LayerNorm(x + attention(x));   x = LayerNorm(x + mlp(x))
        pre-norm:   x = x + attention(LayerNorm(x));   x = x + mlp(LayerNorm(x))

    Args:
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the network's hidden layer.
        norm: "post" as in the original, or "pre".
        score: The score of self-attention, as in `MultiHeadAttention`.
        mask: A mask that holds in every call.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: `activation` (relu); `attention`, what makes self-attention: `MultiHeadAttention`
            or a module of its kind, such as `LinearAttention`, or a `functools.partial` of one;
            `dropout_rate` (0, of what attention and network add),
            `attention_dropout_rate` (0, of the weights); and, as in `MultiHeadAttention`,
            `positions, deterministic, num_kv_heads, normalize_qk, value_features, fused_qkv, dtype,
            param_dtype, precision, kernel_init, out_kernel_init, bias_init, use_bias,
            implementation, block_size`; positions are those of self-attention, and
            `out_kernel_init` is for the kernels that end attention and network.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoderLayer
        >>> layer = TransformerEncoderLayer(2, 8, 16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8)), aj.masks.padding(jnp.array([5, 3]))).shape
        (2, 5, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
        Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture",
        arXiv:2002.04745, Table 1 (post-norm and pre-norm).
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        score: AnyScore = None,
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
        super().__init__(norm, score, mask, parts)

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layer's own streams.
            query_positions: ints `[S]` or `[*B, S]`, 0..S-1 by default.

        Returns:
            `[*B, S, in_features]`.
        """
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = {"query_positions": query_positions, **flags}
        x = self._attend_to_self(jnp.asarray(cast(x, self.dtype)), mask, **at)
        return self._feed_forward(x, **flags)

    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> KVCache:
        """What `with_cache` needs before the first token.

        Args:
            batch: `*B`.
            length: How many tokens there is room for.
            dtype: What keys and values are stored in; None is the layer's, or float32.
            rolling: Whether it keeps the latest tokens, as in `MultiHeadAttention.new_cache`.
        """
        return self.self_attention.new_cache(batch, length, dtype=dtype, rolling=rolling)

    def with_cache(
        self,
        x: Features,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], KVCache]:
        """The layer for the next tokens, causal: a layer of a decoder-only model.

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
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache)
        flags = {"deterministic": deterministic, "rngs": rngs}
        x = jnp.asarray(cast(x, self.dtype))
        x, cache = self._attend_to_cache(x, cache, valid=valid, mask=mask, **flags)
        return self._feed_forward(x, **flags), cache
