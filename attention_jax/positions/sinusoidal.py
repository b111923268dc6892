"""Sinusoidal position encodings."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from attention_jax._core.axes import AnyArray
from attention_jax._core.checks import as_array, check_count


def sinusoidal(
    positions: Real[AnyArray, "*T"], features: int, *, base: float | int = 10_000.0
) -> Float[Array, "*T features"]:
    """The sinusoidal encoding of positions.

        P(p, 2i) = sin(p / base^(2i / D)),  P(p, 2i + 1) = cos(p / base^(2i / D))

    Sines stand in the even channels, cosines in the odd ones; an odd width ends on a sine.

    Args:
        positions: any integer or floating array of positions.
        features: D, the number of channels, at least 1.
        base: the slowest wavelength is about 2π·base.

    Returns:
        float32, the positions' shape with an axis of `features` behind it.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.5.
    """
    as_array("positions", positions)
    features = check_count("features", features, 1)
    pairs = (features + 1) // 2
    frequency = base ** (-2.0 * jnp.arange(pairs, dtype=jnp.float32) / features)
    angles = jnp.asarray(positions).astype(jnp.float32)[..., None] * frequency.reshape(
        (1,) * positions.ndim + (pairs,)
    )
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return waves.reshape(*positions.shape, 2 * pairs)[..., :features]
