"""The linear layers around attention."""

from typing import Any

from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array


class Projection(nnx.LinearGeneral):
    """`y = x W + b`, between features and heads: `flax.nnx.LinearGeneral`, of known sizes."""

    def __call__(self, x: Float[Array, "..."], features: Any = None) -> Float[Array, "..."]:
        """The linear function.

        Args:
            x: `[*B, length, ...]`.
            features: The last axes of the result, which are the layer's own.
        """
        del features
        return super().__call__(x)

    def parameters(self, inputs: Any = None, features: Any = None) -> tuple[Array, Array | None]:
        """The kernel `[*inputs, *features]` and the bias `[*features]`, or None for it."""
        del inputs, features
        return self.kernel[...], None if self.bias is None else self.bias[...]
