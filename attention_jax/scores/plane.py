"""The additive score of one [Tb, Sb] plane, accumulated over groups of hidden features.

    plane(t, s) = Σ_a v_a · f(x_ta + y_sa)

The broadcast form builds [Tb, Sb, A] and is bound by memory; accumulating over features keeps one
plane in cache. For tanh and the logistic sigmoid no transcendental function is needed per pair:

    E = exp(c z),  tanh(x + y) = 1 - 2 r,  sigmoid(x + y) = 1 - r,  r = 1 / (1 + E_x E_y),

with c = 2 for tanh and 1 for sigmoid: the exponentials are per row, and two features share one
division. The derivative takes one plane, r², for rows, columns and v alike. The products stay in
range as long as no |c z| of a row or column exceeds 21, from where on the function is constant to
the last bit. Rows and columns beyond that use the function itself: one key never affects another's
score, not even its rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_jax._core.batched_predicates import one_for_all

Activation = Callable[[Array], Array]

# f = 1 - factor · r with E = exp(rate · z)
_RATIONAL = {
    jnp.tanh: (2.0, 2.0),
    jax.nn.tanh: (2.0, 2.0),
    jax.lax.tanh: (2.0, 2.0),
    jax.nn.sigmoid: (1.0, 1.0),
}

BOUNDED = frozenset(_RATIONAL)  # functions that are finite everywhere, with finite slopes

_LIMIT = 21.0  # of |rate · z|: two denominators, each at most 1 + exp(42), have a finite product

# Pairs from which the rational form pays: it runs no faster on a smaller plane and takes a second
# or two longer to compile.
_SMALLEST_PLANE = 64 * 64

_GROUP = 16  # features of one step; smaller steps compile to code that is several times slower


_any_far = one_for_all(lambda far: jnp.any(far, axis=0))


def additive_plane(
    x: Float[Array, "Tb A"],
    y: Float[Array, "Sb A"],
    v: Float[Array, " A"],
    activation: Activation,
) -> Float[Array, "Tb Sb"]:
    """Sums `v_a f(x_a ⊕ y_a)` over the features; all three arguments get gradients."""
    constants = _RATIONAL.get(activation)
    if constants is None or x.dtype != jnp.float32 or not _is_large(x, y):
        return _direct(x, y, v, activation)
    rate, factor = constants
    far_x, far_y = (jnp.any(jnp.abs(z) * rate > _LIMIT, axis=1) for z in (x, y))
    near_x, near_y = (jnp.clip(z.T * rate, -_LIMIT, _LIMIT) for z in (x, y))
    plane = jnp.sum(v) - factor * _rational(near_x, near_y, v)

    def with_far() -> Array:
        far = far_x[:, None] | far_y[None, :]
        return jnp.where(far, _direct(x, y, v, activation), plane)

    return jax.lax.cond(_any_far(jnp.any(far_x) | jnp.any(far_y)), with_far, lambda: plane)


def _is_large(x: Array, y: Array) -> bool:
    """Whether the rational form pays; False for symbolic lengths."""
    pairs = x.shape[0] * y.shape[0]
    return not jax.export.is_symbolic_dim(pairs) and pairs >= _SMALLEST_PLANE and x.size > 0


def _direct(x: Array, y: Array, v: Array, activation: Activation) -> Array:
    """The sum with the function itself, a feature at a time."""

    def step(plane: Array, feature: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x_a, y_a, v_a = feature
        return plane + v_a * activation(x_a[:, None] + y_a[None, :]), None

    plane = jnp.zeros((x.shape[0], y.shape[0]), x.dtype)
    body = jax.checkpoint(step, prevent_cse=False)
    return jax.lax.scan(body, plane, (x.T, y.T, v))[0]


def _groups(*arrays: Array) -> tuple[Array, ...]:
    """Features in groups, `[A, ...] -> [A / 16, 16, ...]`, filled up with zeros."""
    pad = -arrays[0].shape[0] % _GROUP
    padded = (jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)) for x in arrays)
    return tuple(x.reshape(-1, _GROUP, *x.shape[1:]) for x in padded)


@jax.custom_jvp
def _rational(x: Array, y: Array, v: Array) -> Array:
    """`Σ_a v_a / (1 + exp(x_a ⊕ y_a))` for `x [A, Tb]`, `y [A, Sb]`."""

    def step(plane: Array, features: tuple[Array, Array, Array]) -> tuple[Array, None]:
        e_x, e_y, v = features
        for a in range(0, _GROUP, 2):
            first = 1 + e_x[a][:, None] * e_y[a][None, :]
            second = 1 + e_x[a + 1][:, None] * e_y[a + 1][None, :]
            plane = plane + (v[a] * second + v[a + 1] * first) / (first * second)
        return plane, None

    plane = jnp.zeros((x.shape[1], y.shape[1]), x.dtype)
    groups: Any = _groups(jnp.exp(x), jnp.exp(y), v)
    return jax.lax.scan(step, plane, groups)[0]


@_rational.defjvp
def _rational_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Linear in the tangents, and one plane `r²` a feature for all three of them.

        d(v r) = r dv - v E r² (dx + dy) = r² (dv + E (dv - v dx) - E v dy),  E = E_x E_y

    since `r = r² (1 + E)`. What `r²` is multiplied with are products of a column and a row; such a
    product transposes to a matrix times a vector, far faster than a sum that is fused with the
    division.
    """
    x, y, v = primals

    def move(plane: Array, feature: tuple[Array, ...]) -> tuple[Array, None]:
        e_x, e_y, v, d_x, d_y, d_v = feature
        r = 1 / (1 + e_x[:, None] * e_y[None, :])
        spread = (
            _outer(d_v * jnp.ones_like(e_x), jnp.ones_like(e_y))
            + _outer(e_x * (d_v - v * d_x), e_y)
            + _outer(e_x, e_y * (-v * d_y))
        )
        return plane + r * r * spread, None

    plane = jnp.zeros((x.shape[1], y.shape[1]), x.dtype)
    body = jax.checkpoint(move, prevent_cse=False)
    plane, _ = jax.lax.scan(body, plane, (jnp.exp(x), jnp.exp(y), v, *tangents))
    return _rational(x, y, v), plane


def _outer(column: Array, row: Array) -> Array:
    return jnp.matmul(column[:, None], row[None, :])
