"""The Transformer encoder and decoder: stacks of layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers.arguments import check_width
from attention_jax.layers.body import arguments_of, settings
from attention_jax.layers.caches import check_batch
from attention_jax.layers.construction import Construction
from attention_jax.layers.decoder_layer import TransformerDecoderLayer, check_cross_attention
from attention_jax.layers.encoder_layer import TransformerEncoderLayer
from attention_jax.layers.nonfinite import nan_propagating
from attention_jax.layers.recipes import AnyScore
from attention_jax.layers.remat import Remat, checkpoint_policy
from attention_jax.layers.transformer_layer import TransformerSettings
from attention_jax.softmax import Stats


@settings
class LayerStack(TransformerSettings):
    """A stack of layers, with a final LayerNorm if they are pre-norm.

    Args:
        num_layers: The number of layers.
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        decode: Whether inputs are the next tokens only, as in `MultiHeadAttention`.
        scan_layers: Whether the layers are scanned: one of them is compiled, and each variable of
            `layers` has a leading axis of layers. The results are the same, except dropout in
            Linen.
        remat: Whether the backward pass recomputes a layer from its input: True recomputes all of
            it; a policy of `jax.checkpoint_policies`, or its name, selects the stored values.
    """

    num_layers: int
    num_heads: int
    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    decode: bool = False
    scan_layers: bool = False
    remat: Remat = False

    _counts = ("num_layers", "in_features", "mlp_features")
    _passed_on = (*TransformerSettings._passed_on, "norm", "decode")
    _first = "_build_layer"
    _layer: ClassVar[type]

    def _check(self, given: Any) -> None:
        super()._check(given)
        checkpoint_policy(given.remat)

    def _build(self, make: Construction) -> None:
        self.layers = self._build_layers(make)
        # The output of pre-norm layers is not normalised.
        pre = make.given.norm == "pre"
        make.keep("norm", make.layer_norm(self.in_features) if pre else None)

    def _build_layer(self, make: Construction) -> Any:
        return make.layer(self._layer)

    def _build_layers(self, make: Construction) -> Any:
        return make.layers(lambda: self._build_layer(make), self.num_layers, self.scan_layers)

    def _through(
        self,
        name: str,
        x: Any,
        args: tuple[Any, ...],
        call_options: Mapping[str, Any],
        cache: Any = None,
    ) -> tuple[Array, Any]:
        """Applies the method `name` of every layer: the last output, and the layers' extra results.

        With a cache, each layer's cache follows `x` in the arguments.
        """
        check_width("x", x, self.in_features, "[*B, length, in_features]")
        options = dict(call_options)
        random = {key: options.pop(key) for key in self._random if key in options}

        def call(layer: Any, x: Any, own: Any, **random: Any) -> tuple[Array, Any]:
            given = args if cache is None else (own, *args)
            out = getattr(layer, name)(x, *given, **options, **random)
            return out if isinstance(out, tuple) else (out, None)

        # In the dtype of the output, as a scan requires.
        x, every = self._each(call, self._cast(x), cache, **random)
        norm = self._part("norm")
        return jnp.asarray(x) if norm is None else nan_propagating(norm, x), every

    def _stacked(self, every: Any) -> Any:
        """The layers' results, with a leading axis of layers."""
        return every if self.scan_layers else _stack(every)


def _stack(every: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *every)


@settings
class TransformerEncoder(LayerStack):
    """Transformer encoder: a stack of encoder layers.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    _layer = TransformerEncoderLayer

    @arguments_of(TransformerEncoderLayer.__call__)
    def __call__(self, x: Any, *args: Any, **call_options: Any) -> Float[Array, "*B S D"]:
        """The states after the last layer.

        Returns:
            `[*B, S, in_features]`.
        """
        return self._through("__call__", x, args, call_options)[0]

    @arguments_of(TransformerEncoderLayer.new_cache)
    def new_cache(self, *args: Any, **call_options: Any) -> Any:
        """The layers' empty caches for `with_cache`."""
        layers = self._unbound("layers", self._build_layers)
        every = [layers] * self.num_layers if self.scan_layers else layers
        caches = [layer.new_cache(*args, **call_options) for layer in every]
        return _stack(caches) if self.scan_layers else tuple(caches)

    @arguments_of(TransformerEncoderLayer.with_cache)
    def with_cache(
        self, x: Any, cache: Any, **call_options: Any
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Applies the layers causally to the next tokens: the stack of a decoder-only model.

        Returns:
            `[*B, T, in_features]` and the updated cache.
        """
        check_batch("x", x, cache)
        return self._through("with_cache", x, (), call_options, cache)


@settings
class TransformerDecoder(LayerStack):
    """Transformer decoder: a stack of decoder layers, which attend to one memory.

    Args:
        cross_score: As in `TransformerDecoderLayer`.
        cross_attention: As in `TransformerDecoderLayer`.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    _: dataclasses.KW_ONLY
    cross_score: AnyScore = None
    cross_attention: str = "attention"

    _layer = TransformerDecoderLayer
    _passed_on = (*LayerStack._passed_on, "cross_score", "cross_attention")

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_cross_attention(given)

    @arguments_of(TransformerDecoderLayer.__call__)
    def __call__(self, x: Any, *args: Any, **call_options: Any) -> Float[Array, "*B T D"]:
        """The states after the last layer.

        Returns:
            `[*B, T, in_features]`.
        """
        return self._through("__call__", x, args, call_options)[0]

    @arguments_of(TransformerDecoderLayer.with_weights)
    def with_weights(
        self, x: Any, *args: Any, **call_options: Any
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"]]:
        """The states, and every layer's weights of cross-attention, before dropout.

        Returns:
            The states and `[num_layers, *B, N, T, S]`.
        """
        x, every = self._through("with_weights", x, args, call_options)
        return x, self._stacked(every)

    @arguments_of(TransformerDecoderLayer.with_stats)
    def with_stats(
        self, x: Any, *args: Any, **call_options: Any
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The states, and the statistics of every layer's cross-attention.

        Returns:
            The states and statistics `[num_layers, *B, N, T]`.
        """
        x, every = self._through("with_stats", x, args, call_options)
        return x, self._stacked(every)

    @arguments_of(TransformerDecoderLayer.new_cache)
    def new_cache(self, *args: Any, **call_options: Any) -> Any:
        """The layers' empty caches with their projected memory, for `with_cache`."""

        def call(layer: Any, carry: None, item: None) -> tuple[None, Any]:
            return None, layer.new_cache(*args, **call_options)

        return self._each(call, None)[1]

    @arguments_of(TransformerDecoderLayer.with_cache)
    def with_cache(
        self, x: Any, cache: Any, *args: Any, **call_options: Any
    ) -> tuple[Float[Array, "*B T D"], Any]:
        """Applies the layers to the next tokens.

        Returns:
            `[*B, T, in_features]` and the updated cache.
        """
        check_batch("x", x, cache)
        return self._through("with_cache", x, args, call_options, cache)
