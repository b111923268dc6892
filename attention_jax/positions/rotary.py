"""Rotary position embedding: queries and keys rotated by their position."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import Query, QueryPositions
from attention_jax._core.checks import as_array, check_floating, check_positions, check_positive
from attention_jax._core.numerics import widen
from attention_jax.positions.phases import geometric, waves
from attention_jax.positions.scaling import Scaling

Anything = Annotated[Any, "checked here, with an error made for the reader"]


def rotary(
    x: Query,
    positions: QueryPositions,
    base: float | int = 10_000.0,
    fraction: float | int = 1.0,
    interleaved: bool = False,
    *,
    scaling: Anything = None,
) -> Float[Array, "*B T N H"]:
    """Rotates channel pairs of queries or keys by angles proportional to their position.

        (a, b) -> (a cos pθ_i - b sin pθ_i,  a sin pθ_i + b cos pθ_i),   θ_i = base^(-2i / W)

    So the dot product of a query and a key depends on their distance alone. Apply it to both, with
    their own positions, before `attend`; a cache holds keys that are already rotated.

    Args:
        x: `[*B, T, N, H]`, queries or keys.
        positions: ints `[T]` or `[*B, T]`, any 32-bit values. Phases are exact to 1e-6 at all of
            them.
        base: the slowest wavelength is about 2π·base.
        fraction: the share of channels that are rotated, the first W = fraction · H, in [0, 1].
        interleaved: pairs are channels (2i, 2i + 1), as in the paper and GPT-J; by default they
            are (i, i + W / 2), as in GPT-NeoX and Llama.
        scaling: `linear_scaling`, `ntk_scaling` or `yarn_scaling`, for inputs longer than trained.

    Returns:
        `[*B, T, N, H]` with the dtype of `x`; the turn is computed in float32 at least.

    Raises:
        ValueError: W is not an even integer; shapes do not fit; `base` is not positive.

    Example:
        >>> x = jnp.ones((2, 1, 2))
        >>> [[f"{c:.2f}" for c in row] for row in rotary(x, jnp.array([0, 1]))[:, 0].tolist()]
        [['1.00', '1.00'], ['-0.30', '1.38']]

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        arXiv:2104.09864, eq. 34.
    """
    as_array("x", x)
    check_floating("x", x)
    if x.ndim < 3:
        raise ValueError(f"x must be [*B, T, N, H], got {list(x.shape)}")
    *batch, T, _, H = x.shape
    check_positions("positions", positions, tuple(batch), T)
    if scaling is not None and not isinstance(scaling, Scaling):
        raise TypeError(f"scaling must be a scaling object, got {type(scaling).__name__}")
    base = check_positive("base", base)
    width = _width(fraction, H)
    if width == 0:
        return jnp.asarray(x)
    wide = widen(x)
    turning, rest = wide[..., :width], wide[..., width:]
    sin, cos = _turns(positions, base, width, scaling, wide)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning[..., : width // 2], turning[..., width // 2 :]
    new = a * cos - b * sin, a * sin + b * cos
    if interleaved:
        turned = jnp.stack(new, axis=-1).reshape(turning.shape)
    else:
        turned = jnp.concatenate(new, axis=-1)
    return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)


def _width(fraction: float | int, depth: int) -> int:
    """The number of rotated channels."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie in [0, 1], got {fraction}")
    width = round(fraction * depth)
    if abs(width - fraction * depth) > 1e-6 or width % 2:
        raise ValueError(
            f"the rotary width must be an even number of channels, but fraction · H = "
            f"{fraction} · {depth} = {fraction * depth:g}"
        )
    return width


def _turns(
    positions: Any, base: float, width: int, scaling: Scaling | None, x: Array
) -> tuple[Array, Array]:
    """Sine and cosine, scaled, `[*#B, T, 1, width // 2]` in the dtype of `x`."""
    frequencies = geometric(base, width) if scaling is None else scaling.frequencies(base, width)
    gain = 1.0 if scaling is None else scaling.gain
    angles = waves(positions, frequencies, np.dtype(x.dtype))
    lead = (1,) * (x.ndim - 2 - np.ndim(positions))
    sin, cos = (
        (gain * wave).reshape(*lead, *wave.shape[:-1], 1, wave.shape[-1]) for wave in angles
    )
    return sin, cos
