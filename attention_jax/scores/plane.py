"""The additive score over one [Tb, Sb] plane, one hidden feature after another.

    plane(t, s) = Σ_a v_a · f(x_ta + y_sa)

The broadcast form builds [Tb, Sb, A] and is bound by memory; walking the features keeps one plane in
cache. The walk's body is rematerialised, so that its derivative keeps no plane a feature.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def additive_plane(
    x: Float[Array, "Tb A"],
    y: Float[Array, "Sb A"],
    v: Float[Array, " A"],
    activation: Callable[[Array], Array],
) -> Float[Array, "Tb Sb"]:
    """Sums `v_a f(x_a ⊕ y_a)` over the features; all three arguments get gradients."""

    def step(plane: Array, feature: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x_a, y_a, v_a = feature
        return plane + v_a * activation(x_a[:, None] + y_a[None, :]), None

    plane = jnp.zeros((x.shape[0], y.shape[0]), x.dtype)
    body = jax.checkpoint(step, prevent_cse=False)
    return jax.lax.scan(body, plane, (x.T, y.T, v))[0]
