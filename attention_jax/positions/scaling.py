"""Scalings of rotary frequencies, for inputs longer than those a model was trained on.

A scaling is a small object given as `rotary(..., scaling=)`: it maps the frequencies of the
rotation into others, and may scale the rotated vectors.
"""

import dataclasses
import math
from typing import Annotated, Any

import numpy as np

from attention_jax._core.checks import check_count, check_positive
from attention_jax.positions.phases import geometric

Number = Annotated[Any, "a number, NumPy's too; checked here"]


class Scaling:
    """The interface of a scaling of `rotary`."""

    gain: float = 1.0  # factor of the rotated channels

    def frequencies(self, base: float, width: int) -> np.ndarray:
        """Radians a step of each channel pair, float64 `[width // 2]`."""
        raise NotImplementedError(f"{type(self).__name__} has no frequencies")


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(Scaling):
    """Positions divided by `factor`."""

    factor: float

    def __repr__(self) -> str:
        """The call."""
        return f"linear_scaling({self.factor})"

    def frequencies(self, base: float, width: int) -> np.ndarray:
        """All frequencies divided by the factor."""
        return geometric(base, width) / self.factor


@dataclasses.dataclass(frozen=True, repr=False)
class Ntk(Scaling):
    """A larger base."""

    factor: float

    def __repr__(self) -> str:
        """The call."""
        return f"ntk_scaling({self.factor})"

    def frequencies(self, base: float, width: int) -> np.ndarray:
        """The highest frequency unchanged, the lowest divided by the factor."""
        if width < 4:
            raise ValueError(f"ntk_scaling needs a rotary width of at least 4, got {width}")
        return geometric(base * self.factor ** (width / (width - 2)), width)


@dataclasses.dataclass(frozen=True, repr=False)
class Yarn(Scaling):
    """Low frequencies divided, high ones kept, with a ramp in between."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    gain: float = 1.0

    def __repr__(self) -> str:
        """The call."""
        return (
            f"yarn_scaling({self.factor}, {self.original_length}, beta_fast={self.beta_fast}, "
            f"beta_slow={self.beta_slow}, gain={self.gain:.6g})"
        )

    def frequencies(self, base: float, width: int) -> np.ndarray:
        """`θ / factor` where a wave has fewer than `beta_slow` periods in the original length."""

        def channel(turns: float) -> float:
            return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * log_base)

        log_base = math.log(base)
        low = max(math.floor(channel(self.beta_fast)), 0)
        high = min(math.ceil(channel(self.beta_slow)), width - 1)
        pairs = np.arange(width // 2)
        divided = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
        theta = geometric(base, width)
        return theta / self.factor * divided + theta * (1 - divided)


def linear_scaling(factor: Number) -> Scaling:
    """Position interpolation, `θ' = θ / factor`, equivalent to dividing every position.

    Args:
        factor: new length over trained length.

    Returns:
        A scaling for `rotary`.

    References:
        Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
        Interpolation", arXiv:2306.15595, eq. 4.
    """
    return Linear(check_positive("factor", factor))


def ntk_scaling(factor: Number) -> Scaling:
    """NTK-aware interpolation: `base' = base · factor^(W / (W - 2))` at a rotary width W.

    The fastest channels turn as before; the slowest turn `factor` times slower.

    Args:
        factor: new length over trained length.

    Returns:
        A scaling for `rotary`.

    References:
        Peng et al. 2023, "YaRN", arXiv:2309.00071, §3.1, eq. 16 (after bloc97).
    """
    return Ntk(check_positive("factor", factor))


def yarn_scaling(
    factor: Number,
    original_length: int,
    *,
    beta_fast: float | int = 32,
    beta_slow: float | int = 1,
    gain: float | int | None = None,
) -> Scaling:
    """YaRN: low frequencies are interpolated, high ones kept, and the logits scaled up.

        θ'_i = (1 - γ_i) · θ_i / factor + γ_i · θ_i,   gain = 0.1 · ln(factor) + 1

    γ is 1 for channels that turn more than `beta_fast` times over the original length and 0 for
    those that turn less than `beta_slow` times. Between the two it falls linearly in the channel,
    as in the authors' code and in the models released with it; the paper's eq. 18 has it linear in
    the number of periods.

    Args:
        factor: new length over trained length.
        original_length: the trained length.
        beta_fast: periods above which a channel is kept (β in the paper).
        beta_slow: periods below which it is fully interpolated (α in the paper).
        gain: the factor of rotated queries and keys; the formula's by default, 1 for a
            factor of at most 1.

    Returns:
        A scaling for `rotary`.

    References:
        Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models",
        arXiv:2309.00071, §3.2-3.4, eq. 17-22.
    """
    factor = check_positive("factor", factor)
    fast, slow = check_positive("beta_fast", beta_fast), check_positive("beta_slow", beta_slow)
    if fast <= slow:
        raise ValueError(f"beta_fast must be above beta_slow, got {beta_fast} and {beta_slow}")
    if gain is None:
        gain = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    length = check_count("original_length", original_length, 1)
    return Yarn(factor, length, fast, slow, check_positive("gain", gain))
