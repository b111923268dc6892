"""The linear layers around attention, whose widths are known when the inputs come."""

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
    """`y = x W + b`, between features and heads.

    Parameters are those of `flax.linen.DenseGeneral`, drawn alike: with the fan of a matrix.

    Args:
        axes: How many of the last axes of x are summed over.
        use_bias: Whether there is a b.
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
        """The linear function.

        Args:
            x: `[*B, length, ...]`.
            features: The last axes of the result.
            known: The result, if one product of several projections has it. It holds for that
                product's own input: where an interceptor hands on another x, it is computed anew.

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
        """The kernel `[*inputs, *features]` and the bias `[*features]`, or None for it."""
        flat = (math.prod(inputs), math.prod(features))
        kernel = self.param(
            "kernel", _reshaped(self.kernel_init, flat), (*inputs, *features), self.param_dtype
        )
        if not self.use_bias:
            return kernel, None
        draw = _reshaped(self.bias_init, flat[1:])
        return kernel, self.param("bias", draw, features, self.param_dtype)


def _reshaped(init: Initializer, flat: Shape) -> Initializer:
    """Draws with the shape `flat`, whose fan is the right one, and gives it the other shape."""

    def draw(key: Any, shape: Shape, dtype: Any) -> Any:
        drawn = init(key, flat, dtype)
        if isinstance(drawn, meta.AxisMetadata):  # a partitioned parameter, boxed
            return meta.replace_boxed(drawn, jnp.reshape(drawn.unbox(), shape))
        return jnp.reshape(drawn, shape)

    return draw
