"""Linear layers for Linen, whose widths are inferred from the inputs."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers.fused_projections import Projected
from attention_jax.layers.recipes import BIAS_INIT, KERNEL_INIT, Initializer

Shape = tuple[Any, ...]


class Projection(nn.Module, kw_only=True):
    """Linear projection `y = x W + b` between features and heads.

    Parameters and initialisation are those of `flax.linen.DenseGeneral`, with the fan of a matrix.

    Args:
        axes: The number of trailing axes of x that are contracted.
        use_bias: Whether to add b.
        dtype: Dtype of the computation; None follows the input and the parameters.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of W.
        bias_init: Initialiser of b.
    """

    axes: int = 1
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT
    bias_init: Initializer = BIAS_INIT

    def __call__(
        self, x: Float[Array, "..."], features: Shape, known: Projected | None = None
    ) -> Float[Array, "..."]:
        """Applies the projection.

        Args:
            x: `[*B, length, ...]`.
            features: The last axes of the result.
            known: The result, if a fused product has computed it. It is valid for that product's
                input: if an interceptor passes another x, the result is recomputed.

        Returns:
            `[*B, length, *features]`.
        """
        if known is not None and known.x is x:
            return known.y
        kernel, bias = self.parameters(x.shape[x.ndim - self.axes :], features)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        summed = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        y = jax.lax.dot_general(x, kernel, (summed, ((), ())), precision=self.precision)
        return y if bias is None else y + bias.reshape((1,) * (y.ndim - len(features)) + features)

    @nn.compact
    def parameters(self, inputs: Shape, features: Shape) -> tuple[Array, Array | None]:
        """The kernel `[*inputs, *features]` and the bias `[*features]` or None."""
        flat = (math.prod(inputs), math.prod(features))
        kernel = self.param(
            "kernel", _reshaped(self.kernel_init, flat), (*inputs, *features), self.param_dtype
        )
        if not self.use_bias:
            return kernel, None
        draw = _reshaped(self.bias_init, flat[1:])
        return kernel, self.param("bias", draw, features, self.param_dtype)


def _reshaped(init: Initializer, flat: Shape) -> Initializer:
    """Initialises with the shape `flat`, which has the intended fan, and reshapes."""

    def draw(key: Any, shape: Shape, dtype: Any) -> Any:
        drawn = init(key, flat, dtype)
        if isinstance(drawn, meta.AxisMetadata):  # a partitioned parameter, boxed
            return meta.replace_boxed(drawn, jnp.reshape(drawn.unbox(), shape))
        return jnp.reshape(drawn, shape)

    return draw
