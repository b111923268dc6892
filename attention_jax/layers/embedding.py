"""Absolute position embeddings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax import positions
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import through_float32
from attention_jax.layers.body import Body, settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.position_recipes import AnyPositions


@settings
class AbsolutePositions(Body):
    """Adds absolute position embeddings to `[*B, T, D]`: sinusoidal, learned, or none.

    Args:
        kind: "sinusoidal", "learned" or "none".
        max_length: The number of learned positions; None for the other kinds.
        features: D.
        param_dtype: The dtype of learned positions, `table [max_length, D]`.
    """

    kind: str
    max_length: int | None
    features: int
    _: dataclasses.KW_ONLY
    param_dtype: Any = jnp.float32

    def _build(self, make: Construction) -> None:
        init, shape = jax.nn.initializers.normal(0.02), (self.max_length, self.features)
        learned = self.max_length is not None
        draw = lambda key: init(key, shape, make.given.param_dtype)  # noqa: E731
        self.table = make.param("table", draw) if learned else None

    def __call__(self, x: Array, at: Any) -> Array:
        """Adds the position embeddings to `x`.

        Args:
            x: `[*B, T, D]`.
            at: ints `[T]` or `[*B, T]`; None is 0..T-1.
        """
        if self.kind == "none":
            return x
        if at is None:
            check_length(x.shape[-2], self.max_length)
            at = jnp.arange(x.shape[-2], dtype=jnp.int32)
        if self.table is not None:
            added = positions.learned(self.table[...], at)
        else:
            added = positions.sinusoidal(at, self.features)
        shape = (1,) * (x.ndim - added.ndim) + added.shape

        def spread(added: Array) -> Array:
            return jnp.broadcast_to(added.reshape(shape), x.shape)

        return x + through_float32(spread, added.astype(x.dtype))


def check_length(length: int, max_length: int | None) -> None:
    """Raises a ValueError if there are fewer learned positions; None: no limit."""
    if max_length is not None and length > max_length:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the learned positions: "
            f"max_length is {max_length}"
        )


def absolute(given: AnyPositions, max_length: int | None) -> tuple[str, AnyPositions]:
    """Splits a model's `positions` into the kind of its embeddings and the scheme of attention.

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
    return kind, given if kind == "none" else None
