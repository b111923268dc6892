"""Phases of waves, exact at any position.

    phase = position · frequency mod 2π

In float32 a position of a million times a frequency of 1 is off by 0.03 before any sine is taken.
Here the position is an integer and the frequency a fixed-point fraction of a turn, so the product
modulo one turn is a few integer operations, right to 1e-8 of a radian at any 32-bit position; what
is rounded to float32 is the remainder in [-π, π).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array


def geometric(base: float | int, features: int) -> np.ndarray:
    """The frequencies `base^(-2i / features)`, float64 `[(features + 1) // 2]`, radians a step."""
    return np.asarray(base, np.float64) ** (-2.0 * np.arange((features + 1) // 2) / features)


def waves(positions: Any, frequencies: np.ndarray, dtype: Any) -> tuple[Array, Array]:
    """`(sin, cos)` of `position · frequency`, `[*positions, frequencies]`.

    Args:
        positions: ints of any shape; real numbers are multiplied as they are.
        frequencies: float64 `[P]`, radians a step, known while tracing.
        dtype: float32 or float64.
    """
    positions = jnp.asarray(positions)[..., None]
    frequencies = frequencies.reshape((1,) * (positions.ndim - 1) + (-1,))
    if np.dtype(dtype) == np.float64 or not jnp.issubdtype(positions.dtype, jnp.integer):
        angles = positions.astype(dtype) * jnp.asarray(frequencies.astype(dtype))
        return jnp.sin(angles), jnp.cos(angles)
    positions = positions.astype(jnp.int32)
    angles = _remainder(jnp.abs(positions).astype(jnp.uint32), frequencies)
    return jnp.sin(angles) * jnp.sign(positions).astype(jnp.float32), jnp.cos(angles)


def _remainder(steps: Array, frequencies: np.ndarray) -> Array:
    """`steps · frequency` in [-π, π), float32: the high 32 bits of a fixed-point product."""
    turns = np.mod(frequencies / (2 * np.pi), 1.0)
    words = [int(turn * 2.0**64) for turn in turns.ravel()]
    high, low = (
        np.array([w >> shift & 0xFFFFFFFF for w in words], np.uint32).reshape(turns.shape)
        for shift in (32, 0)
    )
    half, rest = steps >> 16, steps & 0xFFFF
    # of the low word only what carries into the high one; the carries among its own four partial
    # products are dropped: at most 3 units of 2⁻³² turns
    carried = half * (low >> 16) + (half * (low & 0xFFFF) >> 16) + (rest * (low >> 16) >> 16)
    phase = jax.lax.bitcast_convert_type(steps * high + carried, jnp.int32)
    return phase.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
