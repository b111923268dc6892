"""Flax's LayerNorm under strict dtype promotion."""

from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Float

from attention_jax._core.axes import Array


class LayerNorm(nn.LayerNorm):
    """`y = scale · (x − mean) / √(variance + ε) + bias` over the features, in at least float32.

    Arguments and parameters are Flax's. Flax promotes x to float32 implicitly, which JAX's strict
    mode forbids; this class permits it.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "... D"], *, mask: Any = None) -> Float[Array, "... D"]:
        """The normalised features.

        Args:
            x: `[..., D]`.
            mask: Which features count, as in Flax.
        """
        with jax.numpy_dtype_promotion("standard"):
            return super().__call__(x, mask=mask)
