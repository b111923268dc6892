"""ALiBi: attention with linear biases."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import stats_dtype
from attention_jax._core.pytrees import pytree
from attention_jax._core.term import Sides
from attention_jax.positions.bias import Bias


@pytree
class Alibi(Bias):
    """`-slope_n · |distance|`."""

    slopes: Any

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "alibi", {"num_heads": self.slopes.shape[0]}

    def check(self, layout: Layout) -> None:
        """Checks that there is one slope per query head."""
        heads = self.slopes.shape[0]
        if heads != layout.N:
            raise ValueError(f"alibi({heads}) has {heads} slopes but the query has N = {layout.N}")

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """`-slope · |distance|` of every pair in the block."""
        slope = jnp.asarray(self.slopes)
        dtype = stats_dtype(slope.dtype)
        away = -jnp.abs(key_positions[None, :] - query_positions[:, None])
        return slope.astype(dtype) * away.astype(dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """ALiBi slopes of the authors' code, float64 `[N]`.

    If N is a power of two, the geometric series `2^(-8 i / N)`, i = 1..N. Otherwise the series of
    the next lower power of two, followed by every second slope of the next higher one.

    Args:
        num_heads: N, at least 1.

    Returns:
        One slope per head.

    Example:
        >>> alibi_slopes(6).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]

    References:
        Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv:2108.12409, §3, and the authors'
        code for other head counts.
    """
    heads = check_count("num_heads", num_heads, 1)
    lower = 2 ** int(math.log2(heads))

    def series(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

    return np.concatenate([series(lower), series(2 * lower)[0::2][: heads - lower]])


def alibi(num_heads: int) -> Bias:
    """ALiBi (attention with linear biases): `bias(t, s) = -slope_n · |position_s - position_t|`.

    The bias is symmetric; with `causal()` it is the paper's. The slopes are leaves of the object,
    so a gradient with respect to it includes them; to keep them fixed, do not update them.

    Args:
        num_heads: N, the number of query heads, at least 1.

    Returns:
        A bias object.

    Example:
        >>> alibi(8).to_array(2, 3)[0].tolist()
        [[0.0, -0.5, -1.0], [-0.5, 0.0, -0.5]]

    References:
        Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv:2108.12409, eq. in §3.
    """
    return Alibi(alibi_slopes(num_heads).astype(jax.dtypes.canonicalize_dtype(np.float64)))
