"""Keeping what is not a number where it is.

A projection sums over positions only in its gradient, `dW = Σ_t x_t g_tᵀ`. There one position whose
value is NaN spoils W for all, even when nothing looks at it and its g_t is 0: 0 · NaN is NaN.
"""

from collections.abc import Callable

import jax.numpy as jnp

from attention_jax._core.axes import AnyArray, Array


def shielded(function: Callable[[Array], Array], x: AnyArray) -> Array:
    """A function of each position, in which a position that is not finite concerns itself alone.

        y_t = function(x_t) where x_t is finite, NaN elsewhere

    Args:
        function: Maps the last axis and leaves those in front as they are.
        x: Positions in front, features in the last axis.

    Returns:
        What the function returns, with NaN at positions that are not finite: an input that is seen
        stays loud. Such positions add nothing to the gradient of the function's parameters.
    """
    x = jnp.asarray(x)
    finite = jnp.isfinite(x).all(axis=-1)
    y = function(jnp.where(_beside(finite, x), x, 0))
    return jnp.where(_beside(finite, y), y, jnp.nan)


def _beside(rows: Array, x: Array) -> Array:
    return rows.reshape(rows.shape + (1,) * (x.ndim - rows.ndim))
