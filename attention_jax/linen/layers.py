"""A layer of an encoder: attention and a feed-forward network, each with a way around it."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import AnyMask, Features, Memory, cast, check_width
from attention_jax._modules.caches import check_batch
from attention_jax._modules.flags import Flag
from attention_jax._modules.shield import shielded
from attention_jax.cache import KVCache
from attention_jax.linen.caching import stored_cache
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.parts import Parts


class Layer(Parts):
    """What both layers share: self-attention and the network, and the way around each."""

    num_heads: int
    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    decode: bool = False

    def __post_init__(self) -> None:
        self._check(self.num_heads, self.in_features, self.mlp_features, self.positions)
        super().__post_init__()

    def setup(self) -> None:
        """The parts."""
        mask = self._own_mask()
        self.self_attention = self._self_attention(
            self.num_heads, self.in_features, mask, decode=self.decode
        )
        self.self_attention_norm = self._layer_norm()
        self.mlp = self._feed_forward_network(self.in_features, self.mlp_features)
        self.mlp_norm = self._layer_norm()
        self.dropout = self._dropout()

    @nn.nowrap
    def _own_mask(self) -> AnyMask:
        return self.mask

    @nn.nowrap
    def _enter(self, norm: LayerNorm, x: Array) -> Array:
        return shielded(norm, x) if self.norm == "pre" else x

    @nn.nowrap
    def _leave(self, norm: LayerNorm, x: Array, change: Array, deterministic: Flag) -> Array:
        x = x + self.dropout(change, deterministic=deterministic)
        return x if self.norm == "pre" else shielded(norm, x)

    def _attend_to_self(self, x: Array, mask: AnyMask, deterministic: Flag, **told: Any) -> Array:
        norm, options = self.self_attention_norm, {"mask": mask, "deterministic": deterministic}
        # What is not said is left out: other attentions may not know of it.
        options |= {name: value for name, value in told.items() if value is not None}
        change = self.self_attention(self._enter(norm, x), **options)
        return self._leave(norm, x, change, deterministic)

    def _attend_to_cache(
        self, x: Array, cache: KVCache, *, deterministic: Flag, **options: Any
    ) -> tuple[Array, KVCache]:
        norm = self.self_attention_norm
        options["deterministic"] = deterministic
        change, cache = self.self_attention.with_cache(self._enter(norm, x), cache, **options)
        return self._leave(norm, x, change, deterministic), cache

    def _where(self, x: Array, valid: Any, given: Any) -> Any:
        """Where the tokens stand: in a decoding step behind those in the collection "cache"."""
        cache = stored_cache(self.self_attention) if self.decode else None
        return given if cache is None else cache.next_positions(x.shape[-2], valid)

    def _feed_forward(self, x: Array, deterministic: Flag) -> Array:
        change = self.mlp(self._enter(self.mlp_norm, x))
        return self._leave(self.mlp_norm, x, change, deterministic)


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
        positions: The position scheme of self-attention, as in `MultiHeadAttention`.
        activation: The network's elementwise function.
        attention: What makes self-attention: `MultiHeadAttention` or a module of its kind, such as
            `LinearAttention`, or a `functools.partial` of one.
        dropout_rate: Of what attention and network add, in [0, 1).
        attention_dropout_rate: Of the weights, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        num_kv_heads: As in `MultiHeadAttention`; so are the options that follow.
        normalize_qk: As in `MultiHeadAttention`.
        value_features: As in `MultiHeadAttention`.
        fused_qkv: As in `MultiHeadAttention`, for self-attention.
        decode: As in `MultiHeadAttention`, for self-attention: calls bring the next tokens only.
        dtype: As in `MultiHeadAttention`.
        param_dtype: As in `MultiHeadAttention`.
        precision: As in `MultiHeadAttention`.
        kernel_init: As in `MultiHeadAttention`.
        out_kernel_init: That of the kernels that end attention and network; None is `kernel_init`.
        bias_init: As in `MultiHeadAttention`.
        use_bias: As in `MultiHeadAttention`.
        implementation: As in `MultiHeadAttention`.
        block_size: As in `MultiHeadAttention`.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import TransformerEncoderLayer
        >>> layer, x = TransformerEncoderLayer(2, 8, 16), jnp.ones((2, 5, 8))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> layer.apply(variables, x, aj.masks.padding(jnp.array([5, 3]))).shape
        (2, 5, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
        Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture",
        arXiv:2002.04745, Table 1 (post-norm and pre-norm).
    """

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        valid: Any = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B S D"]:
        """The layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag. By
                position or by name: under `nn.remat` either works, traced or static.
            valid: bool `[*#B, S]`, in a decoding step: which of its tokens are real.
            query_positions: ints `[S]` or `[*B, S]`, 0..S-1 by default; a decoding step has its
                own.

        Returns:
            `[*B, S, in_features]`.
        """
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        told = {"valid": valid, "query_positions": query_positions}
        x = self._attend_to_self(x, mask, deterministic, **told)
        return self._feed_forward(x, deterministic)

    def with_cache(
        self,
        x: Features,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], KVCache]:
        """The layer for the next tokens, causal: a layer of a decoder-only model.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.
            mask: Besides causality; the keys of an array are the cache's slots.
            deterministic: As in the call.

        Returns:
            `[*B, T, in_features]` and the next cache.
        """
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache)
        x = jnp.asarray(cast(x, self.dtype))
        options = {"valid": valid, "mask": mask, "deterministic": deterministic}
        x, cache = self._attend_to_cache(x, cache, **options)
        return self._feed_forward(x, deterministic), cache

    @nn.nowrap
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
        return self._empty_cache(self.num_heads, self.in_features, batch, length, dtype, rolling)
