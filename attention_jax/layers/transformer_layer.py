"""The base of encoder and decoder layers: settings, self-attention and network."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax.cache import KVCache
from attention_jax.layers.arguments import AnyMask, cast, check_choice
from attention_jax.layers.body import LinearSettings, setting_names, settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.dropout import Dropout
from attention_jax.layers.feed_forward import Activation, FeedForward
from attention_jax.layers.nonfinite import nan_propagating
from attention_jax.layers.position_recipes import AnyPositions
from attention_jax.layers.recipes import BIAS_INIT, AnyScore, Initializer
from attention_jax.layers.training import Flag

Extra = TypeVar("Extra")


@settings
class TransformerSettings(LinearSettings):
    """The settings shared by a Transformer's layers, stacks and models.

    Args:
        norm: The placement of LayerNorm: "post" as in the original, or "pre".
        score: The score of self-attention, as in `MultiHeadAttention`.
        mask: A mask object or boolean array for self-attention in every call.
        positions: The position scheme of self-attention, as in `MultiHeadAttention`.
        activation: The network's elementwise function.
        attention: The class of self-attention: None for `MultiHeadAttention`, a similar module such
            as `LinearAttention`, or a `functools.partial` of one.
        dropout_rate: Probability that an entry of a sub-layer's output is dropped in training, in
            [0, 1).
        attention_dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to disable dropout; a call's flag overrides it.
        num_kv_heads: K, the number of key/value heads, as in `MultiHeadAttention`.
        normalize_qk: Whether queries and keys are normalised, as in `MultiHeadAttention`.
        value_features: The width of the values, as in `MultiHeadAttention`.
        fused_qkv: Whether self-attention computes queries, keys and values in one matrix product.
        out_kernel_init: Initialiser of the kernels that end attention and network; None is
            `kernel_init`.
        use_bias: Whether projections and network have biases.
    """

    _: dataclasses.KW_ONLY
    norm: str = "post"
    score: AnyScore = None
    mask: AnyMask = None
    positions: AnyPositions = None
    activation: Activation = jax.nn.relu
    attention: Callable[..., Any] | None = None
    dropout_rate: float | int = 0.0
    attention_dropout_rate: float | int = 0.0
    deterministic: Flag = None
    num_kv_heads: int | None = None
    normalize_qk: bool = False
    value_features: int | None = None
    fused_qkv: bool = False
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None

    _counts = ("in_features", "mlp_features")

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_choice("norm", given.norm, "post", "pre")

    def _cast(self, x: Any) -> Array:
        return jnp.asarray(cast(x, self.dtype))


# Only construction uses these.
TransformerSettings._passed_on = tuple(
    name for name in setting_names(TransformerSettings) if name not in ("norm", "dtype")
)
_ATTENTION = ("deterministic", "num_kv_heads", "normalize_qk", "value_features")
_ATTENTION += ("implementation", "block_size", "out_kernel_init")


def scored_attention(
    make: Construction, score: Any, kind: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Makes an attention of a Transformer layer.

    Args:
        make: The construction of the layer.
        score: The attention's score.
        kind: Its class; None for `MultiHeadAttention`.
        **options: Its other settings.
    """
    options |= {"score": score, "dropout_rate": make.given.attention_dropout_rate}
    options |= make.take(*_ATTENTION)
    # None is the default of each; a partial may define another.
    options = {name: value for name, value in options.items() if value is not None}
    sizes = (make.given.num_heads, make.given.in_features)
    return make.attention(kind, *sizes, **options, **make.linear_options())


@settings
class TransformerLayer(TransformerSettings):
    """Self-attention and a network, each with a residual connection and a LayerNorm.

    Args:
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the network's hidden layer.
        decode: Whether inputs are the next tokens only, and self-attention stores keys and values,
            as in `MultiHeadAttention`.
    """

    num_heads: int
    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    decode: bool = False

    _first = "_build_self_attention"
    _arguments: ClassVar = {
        "x": "`[*B, T, in_features]`.",
        "mask": "A mask object or boolean array `[*#B, #N, #T, #T]`, True where a query may attend "
        "to a\n    key of self-attention.",
        "deterministic": "Whether to disable dropout; overrides the constructor's flag.",
        "valid": "bool `[*#B, T]`, which of the tokens are real; with `decode` or a cache.",
        "query_positions": "ints `[T]` or `[*B, T]`, 0..T-1 by default; with `decode` those of the "
        "cache.",
    }

    def _build(self, make: Construction) -> None:
        self.self_attention = self._build_self_attention(make)
        self.self_attention_norm = make.layer_norm(self.in_features)
        self.mlp = make.layer(FeedForward)
        self.mlp_norm = make.layer_norm(self.in_features)
        self.dropout = make.layer(Dropout, rate=make.given.dropout_rate, layer=type(self).__name__)

    def _build_self_attention(self, make: Construction) -> Any:
        options = {"mask": self._self_mask(make.given.mask), **make.take("positions", "fused_qkv")}
        if make.given.decode:
            options["decode"] = True
        return scored_attention(make, make.given.score, make.given.attention, **options)

    def _self_mask(self, mask: AnyMask) -> AnyMask:
        """The mask of self-attention in every call."""
        return mask

    def _residual(
        self,
        norm: Any,
        x: Array,
        change: Callable[[Array], tuple[Array, Extra]],
        deterministic: Flag,
        random: Any,
    ) -> tuple[Array, Extra]:
        """A residual connection around `change`, with the norm before or after; and its extras."""
        pre = self.norm == "pre"
        changed, extra = change(nan_propagating(norm, x) if pre else x)
        x = x + self.dropout(changed, deterministic=deterministic, **random)
        return x if pre else nan_propagating(norm, x), extra

    def _attend_to_self(
        self,
        x: Array,
        deterministic: Flag,
        random: Any,
        cache: KVCache | None = None,
        **call_options: Any,
    ) -> tuple[Array, Any]:
        """Self-attention, and the updated cache if there is one."""
        # Omits arguments that are None: another attention may not accept them.
        call_options = {name: value for name, value in call_options.items() if value is not None}
        call_options |= {"deterministic": deterministic, **random}

        def attend(x: Array) -> tuple[Array, Any]:
            if cache is None:
                return self.self_attention(x, **call_options), None
            return self.self_attention.with_cache(x, cache, **call_options)

        return self._residual(self.self_attention_norm, x, attend, deterministic, random)

    def _feed_forward(self, x: Array, deterministic: Flag, random: Any) -> Array:
        def change(x: Array) -> tuple[Array, None]:
            return self.mlp(x), None

        return self._residual(self.mlp_norm, x, change, deterministic, random)[0]
