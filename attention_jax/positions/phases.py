"""Phases of sinusoids, exact at any integer position.

    phase = position · frequency mod 2π

In float32, the product of a position of a million and a frequency of 1 has an error of 0.03. Here
the position is an integer and the frequency a fixed-point fraction of a turn, so the product modulo
one turn needs only integer operations, with an error below 1e-8 radians at any 32-bit position.
Only the remainder in [-π, π) is rounded to float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array


def geometric(base: float | int, features: int) -> np.ndarray:
    """Frequencies `base^(-2i / features)`, radians per position, float64 `[ceil(features / 2)]`."""
    return np.asarray(base, np.float64) ** (-2.0 * np.arange((features + 1) // 2) / features)


def waves(positions: Any, frequencies: np.ndarray, dtype: Any) -> tuple[Array, Array]:
    """`(sin, cos)` of `position · frequency`, `[*positions, frequencies]`.

    Args:
        positions: ints of any shape; floating positions are multiplied directly.
        frequencies: float64 `[P]`, radians per position, known at trace time.
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
    # of the low word only the carry into the high word is needed; carries between its own partial
    # products are dropped: an error of at most 3 · 2⁻³² turns
    carried = half * (low >> 16) + (half * (low & 0xFFFF) >> 16) + (rest * (low >> 16) >> 16)
    phase = jax.lax.bitcast_convert_type(steps * high + carried, jnp.int32)
    return phase.astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
