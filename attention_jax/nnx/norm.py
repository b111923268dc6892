"""Flax's LayerNorm under strict dtype promotion."""

import jax
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array


class LayerNorm(nnx.LayerNorm):
    """`y = scale · (x − mean) / √(variance + ε) + bias` over the features, in at least float32.

    Arguments and parameters are Flax's. Flax promotes x to float32 implicitly, which JAX's strict
    mode forbids; this class permits it.
    """

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalised features.

        Args:
            x: `[..., D]`.
        """
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x)
