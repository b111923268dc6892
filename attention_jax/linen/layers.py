"""One layer of a Transformer: attention and a feed-forward network, each with a way around it."""

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
from attention_jax._modules.flags import Flag
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.parts import Parts
from attention_jax.linen.scores import AnyScore, check_score
from attention_jax.softmax import Stats

Extra = TypeVar("Extra")
Look = Callable[[Array, Array], tuple[Array, Extra]]


class _Layer(Parts):
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
        return norm(x) if self.norm == "pre" else x

    @nn.nowrap
    def _leave(self, norm: LayerNorm, x: Array, change: Array, deterministic: Flag) -> Array:
        x = x + self.dropout(change, deterministic=deterministic)
        return x if self.norm == "pre" else norm(x)

    def _attend_to_self(self, x: Array, mask: AnyMask, valid: Any, deterministic: Flag) -> Array:
        norm, options = self.self_attention_norm, {"mask": mask, "deterministic": deterministic}
        if valid is not None:
            options["valid"] = valid
        change = self.self_attention(self._enter(norm, x), **options)
        return self._leave(norm, x, change, deterministic)

    def _feed_forward(self, x: Array, deterministic: Flag) -> Array:
        change = self.mlp(self._enter(self.mlp_norm, x))
        return self._leave(self.mlp_norm, x, change, deterministic)


class TransformerEncoderLayer(_Layer):
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
    ) -> Float[Array, "*B S D"]:
        """The layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag. By
                position or by name: under `nn.remat` either works, traced or static.
            valid: bool `[*#B, S]`, in a decoding step: which of its tokens are real.

        Returns:
            `[*B, S, in_features]`.
        """
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        x = self._attend_to_self(x, mask, valid, deterministic)
        return self._feed_forward(x, deterministic)


class TransformerDecoderLayer(_Layer):
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

        Returns:
            `[*B, T, in_features]`.
        """

        def look(query: Array, memory: Array) -> tuple[Array, None]:
            return self.cross(query, memory, **self._told(memory_mask, deterministic)), None

        return self._run(x, memory, mask, valid, look, deterministic)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B N T S"]]:
        """The layer, and the weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.

        Returns:
            The output and `[*B, N, T, S]`; N is 1 for the mean.
        """

        def look(query: Array, memory: Array) -> tuple[Array, Array]:
            weights = self.cross.attention_weights(query, memory, mask=memory_mask)
            return self.cross(query, memory, **self._told(memory_mask, deterministic)), weights

        return self._run(x, memory, mask, None, look, deterministic)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The layer, and the statistics of its attention to the memory.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.

        Returns:
            The output and statistics `[*B, N, T]`; N is 1 for the mean.
        """

        def look(query: Array, memory: Array) -> tuple[Array, Stats]:
            return self.cross.with_stats(query, memory, **self._told(memory_mask, deterministic))

        return self._run(x, memory, mask, None, look, deterministic)

    @nn.nowrap
    def _told(self, mask: AnyMask, deterministic: Flag) -> dict[str, Any]:
        # A mean has no weights to drop, so it takes no flags.
        flags = {} if self.cross_attention == "mean" else {"deterministic": deterministic}
        return {"mask": mask, **flags}

    def _run(
        self, x: Any, memory: Any, mask: AnyMask, valid: Any, look: Look[Extra], flag: Flag
    ) -> tuple[Array, Extra]:
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        x, memory = (jnp.asarray(cast(part, self.dtype)) for part in (x, memory))
        x = self._attend_to_self(x, mask, valid, flag)
        norm = self.cross_attention_norm
        change, extra = look(self._enter(norm, x), memory)
        x = self._leave(norm, x, change, flag)
        return self._feed_forward(x, flag), extra
