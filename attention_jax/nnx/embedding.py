"""Where a token stands, added to its embedding."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax import positions
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax.nnx.places import AnyPositions


class AbsolutePositions(nnx.Module):
    """What is added to the embeddings `[*B, T, D]`: sinusoidal, learned, or nothing.

    Args:
        kind: "sinusoidal", "learned" or "none".
        max_length: How many learned positions there are; None for the other kinds.
        features: D.
        param_dtype: The dtype of learned positions, `table [max_length, D]`.
        rngs: A stream for them.
    """

    def __init__(
        self, kind: str, max_length: int | None, features: int, param_dtype: Any, rngs: nnx.Rngs
    ) -> None:
        self.kind = kind
        self.max_length = max_length
        self.features = features
        if max_length is not None:
            init = jax.nn.initializers.normal(0.02)
            self.table = nnx.Param(init(rngs.params(), (max_length, features), param_dtype))

    def check_length(self, length: int) -> None:
        """Raises a ValueError where there are fewer learned positions."""
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the learned positions: "
                f"max_length is {self.max_length}"
            )

    def __call__(self, x: Array, at: Any) -> Array:
        """`x` with its positions added.

        Args:
            x: `[*B, T, D]`.
            at: ints `[T]` or `[*B, T]`; None is 0..T-1.
        """
        if self.kind == "none":
            return x
        if at is None:
            self.check_length(x.shape[-2])
            at = jnp.arange(x.shape[-2], dtype=jnp.int32)
        if self.kind == "learned":
            places = positions.learned(self.table[...], at)
        else:
            places = positions.sinusoidal(at, self.features)
        return x + places.astype(x.dtype).reshape((1,) * (x.ndim - places.ndim) + places.shape)


def absolute(
    given: AnyPositions, max_length: int | None, features: int, param_dtype: Any, rngs: nnx.Rngs
) -> tuple[AbsolutePositions, AnyPositions]:
    """What a `positions=` argument means for embeddings, and what is left for attention.

    Raises:
        ValueError: If learned positions come without `max_length`, or others with it.
    """
    kind = given if isinstance(given, str) and given in ("sinusoidal", "learned") else "none"
    if kind == "learned":
        if max_length is None:
            raise ValueError('positions="learned" needs max_length')
        check_count("max_length", max_length, 1)
    elif max_length is not None:
        raise ValueError(f'max_length is for positions="learned", got positions={given!r}')
    places = AbsolutePositions(kind, max_length, features, param_dtype, rngs)
    return places, given if kind == "none" else None
