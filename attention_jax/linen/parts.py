"""What the layers of a Transformer are assembled from."""

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
    as_mask,
    check_choice,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, KERNEL_INIT, Initializer
from attention_jax._modules.settings import check_fields
from attention_jax._modules.shield import shielded
from attention_jax.cache import KVCache
from attention_jax.linen.attention import MultiHeadAttention
from attention_jax.linen.mean import MeanAttention
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.randomness import Dropout
from attention_jax.linen.scores import AnyPositions, AnyScore

Activation = Callable[[Array], Array]


class FeedForward(nn.Module):
    """The position-wise network, `y = W_2 f(W_1 x + b_1) + b_2`.

    Args:
        in_features: D, width of input and output.
        mlp_features: Width of the hidden layer.
        activation: f, an elementwise function.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels.
        out_kernel_init: That of the second kernel; None is `kernel_init`.
        bias_init: Initialiser of the biases.
        use_bias: Whether there are biases.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 2.
    """

    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    activation: Activation = jax.nn.relu
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True

    def __post_init__(self) -> None:
        check_count("in_features", self.in_features, 1)
        check_count("mlp_features", self.mlp_features, 1)
        check_fields(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Features) -> Float[Array, "*B T D"]:
        """The network at every position.

        Args:
            x: `[*B, T, in_features]`.
        """
        options = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
            "kernel_init": self.kernel_init,
            "bias_init": self.bias_init,
        }
        hidden = nn.Dense(self.mlp_features, name="hidden", **options)
        options["kernel_init"] = self.out_kernel_init or self.kernel_init
        out = nn.Dense(self.in_features, name="out", **options)
        return shielded(lambda x: out(self.activation(hidden(x))), x)


class Parts(nn.Module, kw_only=True):
    """The options that all layers of a Transformer share, and the parts made with them."""

    norm: str = "post"
    score: AnyScore = None
    mask: AnyMask = None
    positions: AnyPositions = None
    activation: Activation = jax.nn.relu
    attention: Callable[..., MultiHeadAttention] = MultiHeadAttention
    dropout_rate: float | int = 0.0
    attention_dropout_rate: float | int = 0.0
    deterministic: Flag = None
    num_kv_heads: int | None = None
    normalize_qk: bool = False
    value_features: int | None = None
    fused_qkv: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None

    @nn.nowrap
    def _check(
        self, num_heads: int, features: int, mlp_features: int, positions: AnyPositions = None
    ) -> None:
        """Raises, while the layer is written down, what its parts would raise when it is used."""
        check_count("in_features", features, 1)
        check_count("mlp_features", mlp_features, 1)
        check_choice("norm", self.norm, "post", "pre")
        check_fields(self)
        self.mask = as_mask(self.mask)
        self._self_attention(num_heads, features, self.mask, positions=positions, parent=None)

    @nn.nowrap
    def _take(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @nn.nowrap
    def _shared(self) -> dict[str, Any]:
        """The options, to hand on."""
        names = (f.name for f in dataclasses.fields(Parts))
        return self._take(*(n for n in names if n not in ("parent", "name")))

    @nn.nowrap
    def _linear(self) -> dict[str, Any]:
        inits = self._take("kernel_init", "bias_init", "use_bias")
        return {**inits, **self._take("dtype", "param_dtype", "precision")}

    @nn.nowrap
    def _attention(
        self,
        num_heads: int,
        features: int,
        score: AnyScore,
        *,
        make: Callable[..., MultiHeadAttention] = MultiHeadAttention,
        **options: Any,
    ) -> MultiHeadAttention:
        options |= {"score": score, "dropout_rate": self.attention_dropout_rate}
        options |= self._take("num_kv_heads", "normalize_qk", "value_features", "deterministic")
        options |= self._take("implementation", "block_size", "out_kernel_init")
        # None is what every one of them is by default; a partial may have its own.
        given = {n: value for n, value in options.items() if value is not None or n == "parent"}
        return make(num_heads, features, **given, **self._linear())

    @nn.nowrap
    def _self_attention(
        self, num_heads: int, features: int, mask: AnyMask, **options: Any
    ) -> MultiHeadAttention:
        own = {"mask": mask, "make": self.attention, **self._take("positions", "fused_qkv")}
        return self._attention(num_heads, features, self.score, **{**own, **options})

    @nn.nowrap
    def _empty_cache(
        self,
        num_heads: int,
        features: int,
        batch: Any,
        length: int,
        dtype: Any,
        rolling: bool = False,
    ) -> KVCache:
        """A cache for the self-attention of one layer."""
        layer = self._self_attention(num_heads, features, None, parent=None)
        return layer.new_cache(batch, length, dtype=dtype, rolling=rolling)

    @nn.nowrap
    def _mean(self, features: int, **options: Any) -> MeanAttention:
        """What stands in attention's place to see what it is worth."""
        how = self._take("implementation", "block_size")
        return MeanAttention(features, **how, **self._linear(), **options)

    @nn.nowrap
    def _feed_forward_network(self, features: int, mlp_features: int) -> FeedForward:
        own = self._take("activation", "out_kernel_init")
        return FeedForward(features, mlp_features, **own, **self._linear())

    @nn.nowrap
    def _layer_norm(self, **options: Any) -> LayerNorm:
        return LayerNorm(**self._take("dtype", "param_dtype"), **options)

    @nn.nowrap
    def _dropout(self) -> Dropout:
        layer, flags = type(self).__name__, self._take("deterministic")
        return Dropout(self.dropout_rate, layer=layer, **flags)
