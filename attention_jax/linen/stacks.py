"""Layers on top of one another: encoder and decoder, from features to features."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
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
from attention_jax._modules.flags import Flag
from attention_jax._modules.policy import Remat, checkpoint_policy
from attention_jax.linen.layers import TransformerDecoderLayer, TransformerEncoderLayer
from attention_jax.linen.parts import Parts
from attention_jax.linen.scores import AnyScore, check_score
from attention_jax.softmax import Stats

Call = Callable[[Any, Array], tuple[Array, Any]]


class _Stack(Parts):
    """What both stacks share: their layers, and a norm at the end of pre-norm ones."""

    num_layers: int
    num_heads: int
    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    decode: bool = False
    scan_layers: bool = False
    remat: Remat = False

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers, 1)
        checkpoint_policy(self.remat)
        self._check(self.num_heads, self.in_features, self.mlp_features, self.positions)
        super().__post_init__()

    def setup(self) -> None:
        """The layers, and the norm."""
        one = self._layer
        self.layers = one() if self.scan_layers else [one() for _ in range(self.num_layers)]
        # Pre-norm layers leave their sum as it is, so the stack ends in a norm; post-norm has it.
        self.last_norm = self._layer_norm(name="norm") if self.norm == "pre" else None

    @nn.nowrap
    def _layer(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no layers")

    @nn.nowrap
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_heads, self.in_features, self.mlp_features

    def _each(self, call: Call, x: Any) -> tuple[Array, Any]:
        """`x, extra = call(layer, x)`, layer by layer; the extras come stacked."""
        check_width("x", x, self.in_features, "[*B, length, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        if self.remat is not False:
            call = nn.remat(call, policy=checkpoint_policy(self.remat))
        if self.scan_layers:
            scan = nn.scan(
                lambda layer, x, _: call(layer, x),
                variable_axes={True: 0},
                split_rngs={True: True},
                length=self.num_layers,
            )
            x, extras = scan(self.layers, x, None)
            return self._finish(x), extras
        every = []
        for layer in self.layers:
            x, extra = call(layer, x)
            every.append(extra)
        return self._finish(x), jax.tree.map(lambda *parts: jnp.stack(parts), *every)

    @nn.nowrap
    def _finish(self, x: Any) -> Array:
        return jnp.asarray(x) if self.last_norm is None else self.last_norm(x)


class TransformerEncoder(_Stack):
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
    ) -> Float[Array, "*B S D"]:
        """The states after the last layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            valid: bool `[*#B, S]`, in a decoding step: which of its tokens are real.

        Returns:
            `[*B, S, in_features]`.
        """

        def call(layer: Any, x: Array) -> tuple[Array, None]:
            return layer(x, mask, deterministic, valid=valid), None

        return self._each(call, x)[0]


class TransformerDecoder(_Stack):
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
    ) -> Float[Array, "*B T D"]:
        """The states after the last layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask.
            memory_mask: For attention to the memory.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            valid: bool `[*#B, T]`, in a decoding step: which of its tokens are real.

        Returns:
            `[*B, T, in_features]`.
        """

        def call(layer: Any, x: Array) -> tuple[Array, None]:
            return layer(x, memory, mask, memory_mask, deterministic, valid=valid), None

        return self._each(call, x)[0]

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"]]:
        """The states, and every layer's weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.

        Returns:
            The states and `[num_layers, *B, N, T, S]`.
        """

        def call(layer: Any, x: Array) -> tuple[Array, Any]:
            return layer.with_weights(x, memory, mask, memory_mask, deterministic)

        return self._each(call, x)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        deterministic: Flag = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The states, and the statistics of every layer's attention to the memory.

        Nothing of size T·S is kept.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.

        Returns:
            The states and statistics `[num_layers, *B, N, T]`.
        """

        def call(layer: Any, x: Array) -> tuple[Array, Any]:
            return layer.with_stats(x, memory, mask, memory_mask, deterministic)

        return self._each(call, x)
