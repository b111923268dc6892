"""The additive plane is exact for any finite input, with its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.scores import plane as plane_module
from attention_jax.scores.plane import additive_plane

SLOPES = {
    jnp.tanh: (np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    jax.nn.sigmoid: (
        lambda z: 0.5 * (1 + np.tanh(z / 2)),
        lambda z: 0.25 * (1 - np.tanh(z / 2) ** 2),
    ),
}
# below and above the number of pairs from which the rational form is used
SMALL, LARGE = (5, 7), (61, 71)
T, S, A = *LARGE, 3
plane = jax.jit(additive_plane, static_argnums=3)


def truth(x, y, v, activation):
    """Plane, and the gradients of its sum, in float64."""
    value, slope = SLOPES[activation]
    # the library adds in float32; so does the truth, before it goes on in float64
    z = (x[:, None] + y[None]).astype(np.float64)
    out = value(z) @ v.astype(np.float64)
    d = slope(z) * v
    return out, d.sum(1), d.sum(0), value(z).sum((0, 1))


@pytest.mark.thorough
@given(
    seed=st.integers(0, 2**16),
    centre=st.sampled_from([0.0, 3.0, -50.0, 1e3, -1e4]),
    spread=st.sampled_from([0.1, 3.0, 30.0, 1e4]),
    other=st.sampled_from([0.1, 3.0, 30.0, 1e4]),
    activation=st.sampled_from(list(SLOPES)),
    size=st.sampled_from([SMALL, LARGE]),
)
def test_exact_also_for_large_opposite_inputs(seed, centre, spread, other, activation, size):
    T, S = size
    rng = np.random.default_rng(seed)
    x = (centre + spread * rng.normal(size=(T, A))).astype(np.float32)
    y = (-centre + other * rng.normal(size=(S, A))).astype(np.float32)
    v = rng.normal(size=A).astype(np.float32)
    out, *slopes = truth(x, y, v, activation)
    # rounding of the inputs themselves, seen through a slope of at most 1
    atol = 3e-6 + 2e-7 * min(abs(centre), 1e4) * A
    np.testing.assert_allclose(plane(x, y, v, activation), out, rtol=1e-5, atol=atol)
    gradients = jax.jit(jax.grad(lambda *args: plane(*args, activation).sum(), argnums=(0, 1, 2)))
    for got, want in zip(gradients(x, y, v), slopes, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=20 * atol)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33])
def test_any_number_of_features(width, size):
    T, S = size
    rng = np.random.default_rng(width)
    x, y = rng.normal(size=(T, width)), rng.normal(size=(S, width))
    v = rng.normal(size=width)
    x, y, v = (z.astype(np.float32) for z in (x, y, v))
    np.testing.assert_allclose(
        plane(x, y, v, jnp.tanh), truth(x, y, v, jnp.tanh)[0], rtol=1e-5, atol=1e-5
    )


def test_second_order_agrees_with_the_function_itself():
    rng = np.random.default_rng(0)
    x, y, v = (rng.normal(size=s).astype(np.float32) for s in ((T, A), (S, A), (A,)))

    def curvature(activation):
        def slope(x):
            return jnp.sum(jax.grad(lambda x: jnp.sum(plane(x, y, v, activation) ** 2))(x) ** 2)

        return jax.grad(slope)(x)

    np.testing.assert_allclose(
        curvature(jnp.tanh), curvature(lambda z: jnp.tanh(z)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("size", "activation", "rational"),
    [
        ((64, 64), jnp.tanh, True),
        ((63, 65), jnp.tanh, False),
        ((1, 4096), jax.nn.sigmoid, True),
        ((1, 4095), jax.nn.sigmoid, False),
        ((64, 64), jax.nn.relu, False),
    ],
)
def test_the_rational_form_is_used_from_64_by_64_pairs_on(size, activation, rational, monkeypatch):
    calls, form = [], plane_module._rational
    monkeypatch.setattr(plane_module, "_rational", lambda *args: calls.append(args) or form(*args))
    x, y = (np.ones((n, A), np.float32) for n in size)
    jax.eval_shape(lambda *args: additive_plane(*args, activation), x, y, np.ones(A, np.float32))
    assert bool(calls) == rational


def test_float64_is_kept():
    with jax.enable_x64(True):
        x, y, v = np.ones((T, A)), -np.ones((S, A)) / 3, np.ones(A)
        got = additive_plane(jnp.asarray(x), jnp.asarray(y), jnp.asarray(v), jnp.tanh)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, A * np.tanh(2 / 3) * np.ones((T, S)), rtol=1e-14)


def test_a_key_that_changes_leaves_the_others_to_the_last_bit():
    rng = np.random.default_rng(3)
    x, y, v = (rng.normal(size=s).astype(np.float32) for s in ((T, A), (S, A), (A,)))
    before = np.asarray(plane(x, y, v, jnp.tanh))
    for value in (5.0, -40.0, 1e6):
        y[2] = value
        after = np.asarray(plane(x, y, v, jnp.tanh))
        np.testing.assert_array_equal(np.delete(after, 2, 1), np.delete(before, 2, 1))
        assert not np.array_equal(after[:, 2], before[:, 2])
