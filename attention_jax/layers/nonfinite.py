"""Keeping what is not a number where it is.

A projection sums over positions only in its gradient, `dW = Σ_t x_t g_tᵀ`. There one position whose
value is NaN spoils W for all, even when nothing looks at it and its g_t is 0: 0 · NaN is NaN.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax._core.axes import AnyArray, Array
from attention_jax.softmax import Stats


def calm(function: Callable[[Array], Array], x: AnyArray) -> Array:
    """`function(x)`, with 0 in place of a position that is not finite."""
    x = jnp.asarray(x)
    return function(jnp.where(_beside(_finite(x), x), x, 0))


def loud(y: AnyArray, x: AnyArray) -> Array:
    """`y` where the position of x is finite, NaN elsewhere; y has the same axes in front."""
    y = jnp.asarray(y)
    return jnp.where(_beside(_finite(jnp.asarray(x)), y), y, jnp.nan)


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
    return loud(calm(function, x), x)


def answered(out: Array, seen: Array, x: AnyArray) -> Array:
    """What attention answers to calm queries: NaN where a query was not finite and saw anything.

    So neither its keys and values nor the parameters around it get a gradient from such a query
    where nothing depends on its answer.

    Args:
        out: `[*B, T, ...]`.
        seen: What the queries saw, `[*B, T, N, V]`: 0 where it was nothing.
        x: What the queries are made of, `[*B, T, D]`.
    """
    nothing = ~jnp.any(seen != 0, axis=(-2, -1))
    return jnp.where(_beside(_finite(jnp.asarray(x)) | nothing, out), out, jnp.nan)


def loud_rows(stats: Stats, x: AnyArray) -> Stats:
    """Statistics `[*B, N, T]`: NaN where a query was not finite and saw anything."""
    known = _finite(jnp.asarray(x))[..., None, :] | (stats.lse == -jnp.inf)
    return jax.tree.map(lambda rows: jnp.where(known, rows, jnp.nan), stats)


def _finite(x: Array) -> Array:
    return jnp.isfinite(x).all(axis=-1)


def _beside(rows: Array, x: Array) -> Array:
    return rows.reshape(rows.shape + (1,) * (x.ndim - rows.ndim))
