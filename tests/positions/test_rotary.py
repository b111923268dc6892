"""Rotary positions against complex rotation in float64; sinusoids and learned tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import positions

rotary = positions.rotary


def oracle(x, at, theta, *, width=None, interleaved=False, gain=1.0):
    """Channel pairs as complex numbers, rotated by `at · theta`; float64."""
    x = np.asarray(x, np.float64)
    width = x.shape[-1] if width is None else width
    a, b = (
        (x[..., 0:width:2], x[..., 1:width:2])
        if interleaved
        else (x[..., : width // 2], x[..., width // 2 : width])
    )
    rotated = (a + 1j * b) * np.exp(1j * np.asarray(at)[..., None, None] * theta) * gain
    out = x.copy()
    if interleaved:
        out[..., 0:width:2], out[..., 1:width:2] = rotated.real, rotated.imag
    else:
        out[..., : width // 2], out[..., width // 2 : width] = rotated.real, rotated.imag
    return out


def geometric(base, width):
    return base ** (-np.arange(0, width, 2) / width)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_rotates_pairs_by_exact_phases(x, interleaved):
    for at in (
        np.arange(5),
        np.array([0, 1, 999_983, 10**6, 2**31 - 1]),
        np.array([[0, 0, 0, 1, 2], [-3, -1, 0, 7, 123_456]]),  # left padding, and before the start
    ):
        for base, width in ((10_000.0, 8), (500.0, 4)):
            got = rotary(x, at, base, width / 8, interleaved)
            want = oracle(x, at, geometric(base, width), width=width, interleaved=interleaved)
            np.testing.assert_allclose(got, want, atol=3e-6)


def test_explicit_values_at_position_one():
    x = np.arange(1.0, 5.0, dtype=np.float32).reshape(1, 1, 4)
    c, s, c2, s2 = np.cos(1), np.sin(1), np.cos(0.01), np.sin(0.01)
    np.testing.assert_allclose(
        rotary(x, np.array([1]))[0, 0],
        [c - 3 * s, 2 * c2 - 4 * s2, s + 3 * c, 2 * s2 + 4 * c2],
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        rotary(x, np.array([1]), interleaved=True)[0, 0],
        [c - 2 * s, s + 2 * c, 3 * c2 - 4 * s2, 3 * s2 + 4 * c2],
        rtol=1e-6,
    )


def test_a19_the_dot_product_depends_on_the_distance_alone(x):
    query, key = x[:1, :1], x[1:, :1]
    for interleaved in (False, True):
        dots = [
            (
                rotary(query, np.array([p + 3]), interleaved=interleaved)
                * rotary(key, np.array([p]), interleaved=interleaved)
            ).sum(-1)
            for p in (0, 1, 7, 50, 10**6)
        ]
        for dot in dots[1:]:
            np.testing.assert_allclose(dot, dots[0], atol=1e-5)
        assert np.abs(dots[0] - (query * key).sum(-1)).max() > 0.1
    # the two conventions are equal up to the order of the channels
    order = np.arange(8).reshape(4, 2).T.ravel()
    at = np.arange(5)
    np.testing.assert_allclose(
        rotary(x, at, interleaved=True)[..., order], rotary(x[..., order], at), atol=1e-6
    )


def test_a20_a_call_at_an_offset_equals_rows_of_a_longer_call(x):
    whole = rotary(x, np.arange(5))
    step = jax.jit(lambda x, start: rotary(x, start + jnp.arange(x.shape[1])))
    for start in (3, 0, 3):
        np.testing.assert_allclose(step(x[:, start:][:, :2], start), whole[:, start:][:, :2])
        eager = rotary(x[:, start:], np.arange(start, 5))
        np.testing.assert_allclose(eager, whole[:, start:], atol=1e-6)
    items = rotary(x, np.array([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]))
    np.testing.assert_array_equal(items[0], whole[0])
    np.testing.assert_allclose(items[1], rotary(x[1], np.arange(5, 10)), atol=1e-6)


def test_scalings(x):
    at = np.array([0, 1, 5, 2_000, 100_000])
    theta = geometric(10_000.0, 8)
    got = rotary(x, at, scaling=positions.linear_scaling(np.float32(4)))
    np.testing.assert_allclose(got, oracle(x, at, theta / 4), atol=3e-6)

    got = rotary(x, at, scaling=positions.ntk_scaling(4))
    slower = geometric(10_000.0 * 4 ** (8 / 6), 8)
    np.testing.assert_allclose(slower[[0, -1]], theta[[0, -1]] / [1, 4])
    np.testing.assert_allclose(got, oracle(x, at, slower), atol=3e-6)

    # 2048 trained positions: channel i makes 2048 θ_i / 2π rotations: 326, 32.6, 3.26 and 0.33
    def channel(turns):
        return 8 * np.log(2048 / (turns * 2 * np.pi)) / (2 * np.log(10_000))

    low, high = np.floor(channel(32)), np.ceil(channel(1))
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    got = rotary(x, at, scaling=positions.yarn_scaling(8, 2048))
    assert list(ramp) == [0, 0, 0.5, 1]
    want = oracle(x, at, theta * (1 - ramp + ramp / 8), gain=0.1 * np.log(8) + 1)
    np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_dtype_is_kept(x, dtype):
    narrow = jnp.asarray(x).astype(dtype)
    got = rotary(narrow, np.arange(5))
    assert got.dtype == narrow.dtype
    want = oracle(narrow, np.arange(5), geometric(10_000.0, 8)).astype(narrow.dtype)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=1e-2)


def test_the_gradient_is_the_inverse_rotation(x):
    at = np.arange(5)
    rotated, pull = jax.vjp(lambda x: rotary(x, at, interleaved=True), x)
    np.testing.assert_allclose(pull(rotated)[0], x, atol=2e-6)
    empty = rotary(x[:, :0], np.arange(0))
    assert empty.shape == (2, 0, 3, 8)
    np.testing.assert_array_equal(rotary(x, at, fraction=0), x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: rotary(x[..., :7], np.arange(5)), ValueError, "even number .* 1.0 · 7 = 7"),
        (lambda x: rotary(x, np.arange(5), fraction=0.3), ValueError, "0.3 · 8 = 2.4"),
        (lambda x: rotary(x, np.arange(5), fraction=1.5), ValueError, "fraction"),
        (lambda x: rotary(x, np.arange(4)), ValueError, r"positions has shape \[4\]"),
        (lambda x: rotary(x, np.arange(5.0)), TypeError, "positions must be integers"),
        (lambda x: rotary(x, np.arange(5), base=0), ValueError, "base"),
        (lambda x: rotary(x[0, 0], np.arange(3)), ValueError, r"\[\*B, T, N, H\]"),
        (lambda x: rotary(x, np.arange(5), scaling=2.0), TypeError, "scaling"),
        (lambda x: rotary(x, np.arange(5), base=np.inf), ValueError, "base"),
        (lambda x: positions.sinusoidal(np.arange(5), 4, base=-1), ValueError, "base"),
        (lambda x: positions.linear_scaling(0), ValueError, "factor"),
        (lambda x: positions.ntk_scaling(np.nan), ValueError, "factor"),
        (lambda x: positions.yarn_scaling(2, 100, gain=0), ValueError, "gain"),
        (lambda x: positions.yarn_scaling(2, 100, gain=-1.5), ValueError, "gain"),
        (lambda x: positions.yarn_scaling(2, 100, gain=np.inf), ValueError, "gain"),
        (lambda x: positions.yarn_scaling(2, 100, beta_slow=0), ValueError, "beta_slow"),
        (lambda x: positions.yarn_scaling(2, 100, beta_fast=1), ValueError, "beta_fast"),
    ],
)
def test_rotary_mistakes(x, call, error, message):
    with pytest.raises(error, match=message):
        call(x)


def test_sinusoids_are_exact_at_large_positions_and_odd_widths_end_with_a_sine():
    at = np.array([[0, 1, 5], [1_000, 999_999, 10**6]])
    got = positions.sinusoidal(at, 7)
    assert got.shape == (2, 3, 7)
    theta = 10_000.0 ** (-2 * np.arange(4) / 7)
    angles = at[..., None] * theta
    want = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(2, 3, 8)[..., :7]
    np.testing.assert_allclose(got, want, atol=1e-6)
    halves = positions.sinusoidal(np.array([0.5, 2.5], np.float32), 4)
    np.testing.assert_allclose(halves[:, 0], np.sin([0.5, 2.5]), rtol=1e-6)


def test_learned_positions():
    table = np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)
    at = np.array([[0, 5], [2, 2]])
    np.testing.assert_array_equal(positions.learned(table, at), table[at])
    with pytest.raises(ValueError, match="run from 0 to 6, but the table has rows for 0 to 5"):
        positions.learned(table, np.array([0, 6]))
    with pytest.raises(ValueError, match="run from -1 to 0"):
        positions.learned(table, np.array([-1, 0]))
    with pytest.raises(TypeError, match="positions must be integers"):
        positions.learned(table, np.array([1.0]))
    traced = jax.jit(positions.learned)(table, np.array([5, 6, -1]))
    np.testing.assert_array_equal(traced[0], table[5])
    assert np.isnan(traced[1:]).all()
    gradient = jax.grad(lambda t: positions.learned(t, at).sum())(table)
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 2, 0, 0, 1])
