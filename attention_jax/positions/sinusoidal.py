"""Sinusoidal position encoding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from attention_jax._core.axes import AnyArray
from attention_jax._core.checks import as_array, check_count, check_positive
from attention_jax.positions.phases import geometric, waves


def sinusoidal(
    positions: Real[AnyArray, "*T"], features: int, *, base: float | int = 10_000.0
) -> Float[Array, "*T features"]:
    """Sinusoidal position encoding, `[*T, features]`.

        P(p, 2i) = sin(p / base^(2i / D)),  P(p, 2i + 1) = cos(p / base^(2i / D))

    Sines are in the even channels, cosines in the odd ones; an odd width ends with a sine. At
    integer positions the phases are exact, for any size.

    Args:
        positions: integer or floating array of any shape.
        features: D, the number of channels, at least 1.
        base: the slowest wavelength is about 2π·base; positive.

    Returns:
        float32, the shape of `positions` with a last axis of size `features`.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.5.
    """
    as_array("positions", positions)
    features, base = check_count("features", features, 1), check_positive("base", base)
    pair = jnp.stack(waves(positions, geometric(base, features), jnp.float32), axis=-1)
    return pair.reshape(*positions.shape, 2 * pair.shape[-2])[..., :features]
