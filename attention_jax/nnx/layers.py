"""One layer of a Transformer: attention and a feed-forward network, each with a way around it."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
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
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.mean import MeanAttention
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.parts import Parts
from attention_jax.nnx.randomness import AnyRngs
from attention_jax.nnx.scores import AnyScore
from attention_jax.softmax import Stats

Extra = TypeVar("Extra")
Look = Callable[[Array, Array], tuple[Array, Extra]]


class _Layer(nnx.Module):
    """What both layers share: self-attention and the network, and the way around each."""

    def __init__(self, norm: str, score: AnyScore, mask: AnyMask, parts: Parts) -> None:
        self.in_features = check_count("in_features", parts.in_features, 1)
        self.norm = check_choice("norm", norm, "post", "pre")
        self.dtype = parts.dtype
        self.self_attention = parts.attention(score, mask)
        self.self_attention_norm = parts.layer_norm()
        self.mlp = parts.feed_forward()
        self.mlp_norm = parts.layer_norm()
        self.dropout = parts.dropout(type(self).__name__)

    def _enter(self, norm: LayerNorm, x: Array) -> Array:
        return norm(x) if self.norm == "pre" else x

    def _leave(self, norm: LayerNorm, x: Array, change: Array, **flags: Any) -> Array:
        x = x + self.dropout(change, **flags)
        return x if self.norm == "pre" else norm(x)

    def _attend_to_self(self, x: Array, mask: AnyMask, **flags: Any) -> Array:
        norm = self.self_attention_norm
        change = self.self_attention(self._enter(norm, x), mask=mask, **flags)
        return self._leave(norm, x, change, **flags)

    def _feed_forward(self, x: Array, **flags: Any) -> Array:
        change = self.mlp(self._enter(self.mlp_norm, x))
        return self._leave(self.mlp_norm, x, change, **flags)


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
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: `activation` (relu), `dropout_rate` (0, of what attention and network add),
            `attention_dropout_rate` (0, of the weights); and, as in `MultiHeadAttention`,
            `deterministic, num_kv_heads, normalize_qk, dtype, param_dtype, precision, kernel_init,
            bias_init, use_bias, implementation, block_size`.

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
    ) -> Float[Array, "*B S D"]:
        """The layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layer's own streams.

        Returns:
            `[*B, S, in_features]`.
        """
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        flags = {"deterministic": deterministic, "rngs": rngs}
        x = self._attend_to_self(jnp.asarray(cast(x, self.dtype)), mask, **flags)
        return self._feed_forward(x, **flags)


class TransformerDecoderLayer(_Layer):
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
            self.cross_attention = parts.attention(cross_score)
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

        Returns:
            `[*B, T, in_features]`.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}

        def look(query: Array, memory: Array) -> tuple[Array, None]:
            return self.cross_attention(query, memory, **self._cross(memory_mask, flags)), None

        return self._run(x, memory, mask, look, flags)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B N T S"]]:
        """The layer, and the weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            The output and `[*B, N, T, S]`; N is 1 for the mean.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}

        def look(query: Array, memory: Array) -> tuple[Array, Array]:
            weights = self.cross_attention.attention_weights(query, memory, mask=memory_mask)
            return self.cross_attention(query, memory, **self._cross(memory_mask, flags)), weights

        return self._run(x, memory, mask, look, flags)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The layer, and the statistics of its attention to the memory.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            The output and statistics `[*B, N, T]`; N is 1 for the mean.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}

        def look(query: Array, memory: Array) -> tuple[Array, Stats]:
            return self.cross_attention.with_stats(query, memory, **self._cross(memory_mask, flags))

        return self._run(x, memory, mask, look, flags)

    def _cross(self, mask: AnyMask, flags: dict[str, Any]) -> dict[str, Any]:
        # A mean has no weights to drop, so it takes no flags.
        return {"mask": mask, **({} if isinstance(self.cross_attention, MeanAttention) else flags)}

    def _run(
        self, x: Any, memory: Any, mask: AnyMask, look: Look[Extra], flags: dict[str, Any]
    ) -> tuple[Array, Extra]:
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_width("memory", memory, self.in_features, "[*B, S, in_features]")
        x, memory = (jnp.asarray(cast(part, self.dtype)) for part in (x, memory))
        x = self._attend_to_self(x, mask, **flags)
        norm = self.cross_attention_norm
        change, extra = look(self._enter(norm, x), memory)
        x = self._leave(norm, x, change, **flags)
        return self._feed_forward(x, **flags), extra
