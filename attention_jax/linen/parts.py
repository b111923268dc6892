"""What the layers of a Transformer are assembled from."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyMask,
    as_mask,
    check_choice,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, KERNEL_INIT, Initializer
from attention_jax._modules.settings import check_fields
from attention_jax.linen.attention import MultiHeadAttention
from attention_jax.linen.randomness import Dropout
from attention_jax.linen.scores import AnyPositions, AnyScore

Activation = Callable[[Array], Array]


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
    def _dropout(self) -> Dropout:
        layer, flags = type(self).__name__, self._take("deterministic")
        return Dropout(self.dropout_rate, layer, **flags)
