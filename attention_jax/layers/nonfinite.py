"""Zero-filling of non-finite positions, which keeps them out of gradients of shared parameters.

A projection sums over positions only in its gradient, `dW = Σ_t x_t g_tᵀ`. A position whose value
is NaN makes all of dW NaN, even if the position is masked and g_t is 0: 0 · NaN is NaN. Therefore
such positions are zero-filled in the input, and the results that depend on them are set to NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax._core.axes import AnyArray, Array
from attention_jax.softmax import Stats


def zero_filled(x: AnyArray) -> Array:
    """`x`, with 0 at positions that are not finite."""
    x = jnp.asarray(x)
    return jnp.where(_aligned(_finite(x), x), x, 0)


def propagate_nan(y: AnyArray, x: AnyArray) -> Array:
    """`y`, with NaN where `x` is not finite; both have the same leading axes."""
    y = jnp.asarray(y)
    return jnp.where(_aligned(_finite(jnp.asarray(x)), y), y, jnp.nan)


def nan_propagating(function: Callable[[Array], Array], x: AnyArray) -> Array:
    """Applies a function to each position; non-finite positions affect only themselves.

        y_t = function(x_t) where x_t is finite, NaN elsewhere

    Args:
        function: Maps the last axis and keeps the leading axes.
        x: Positions in the leading axes, features in the last axis.

    Returns:
        The function's results. Non-finite positions do not contribute to the gradient of its
        parameters.
    """
    return propagate_nan(function(zero_filled(x)), x)


def propagate_nan_of_queries(out: Array, attended: Array, x: AnyArray) -> Array:
    """The output for zero-filled queries, with NaN for non-finite queries with visible keys.

    Such a query contributes to the gradients of keys, values and parameters only if the loss
    depends on its output.

    Args:
        out: `[*B, T, ...]`.
        attended: The output of attention, `[*B, T, N, V]`: 0 for an empty row.
        x: The inputs of the queries, `[*B, T, D]`.
    """
    empty = ~jnp.any(attended != 0, axis=(-2, -1))
    return jnp.where(_aligned(_finite(jnp.asarray(x)) | empty, out), out, jnp.nan)


def propagate_nan_to_stats(stats: Stats, x: AnyArray) -> Stats:
    """Statistics `[*B, N, T]`, with NaN for non-finite queries with visible keys."""
    known = _finite(jnp.asarray(x))[..., None, :] | (stats.lse == -jnp.inf)
    return jax.tree.map(lambda rows: jnp.where(known, rows, jnp.nan), stats)


def _finite(x: Array) -> Array:
    return jnp.isfinite(x).all(axis=-1)


def _aligned(rows: Array, x: Array) -> Array:
    """`rows` with trailing axes of length 1, as many as `x` has more."""
    return rows.reshape(rows.shape + (1,) * (x.ndim - rows.ndim))
