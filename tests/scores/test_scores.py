"""Scores against their formulas in float64, on odd sizes, shared and per-head parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import scores
from attention_jax.scores.log_position import LogPosition

RNG = np.random.default_rng(0)
B, T, S, N, K, H, HK, A = 2, 5, 7, 6, 3, 4, 3, 5


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


QUERY, KEY, OTHER = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, HK)


def pairs(key, formula):
    """`formula(q, k, n)` for every pair, `[B, N, T, S]`."""
    out = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(out.shape):
        q, k = QUERY[b, t, n], key[b, s, n // (N // K)]
        out[b, n, t, s] = formula(q.astype(np.float64), k.astype(np.float64), n)
    return out


WEIGHT, WEIGHTS = normal(H, HK), normal(N, H, HK)
W_QUERY, W_QUERIES = normal(H, A), normal(N, H, A)
W_KEY, W_KEYS = normal(HK, A), normal(N, HK, A)
V, VS = normal(A), normal(N, A)
JOINED = np.concatenate([W_QUERY, W_KEY])
TEMPERATURES = np.linspace(0.5, 2, N).astype(np.float32)


def relu(x):
    return np.maximum(x, 0)


CASES = {
    "dot": (KEY, scores.dot(), lambda q, k, n: q @ k),
    "scaled": (KEY, scores.scaled_dot(), lambda q, k, n: q @ k / np.sqrt(H)),
    "scale": (KEY, scores.scaled_dot(0.3), lambda q, k, n: 0.3 * q @ k),
    "scale per head": (
        KEY,
        scores.scaled_dot(TEMPERATURES),
        lambda q, k, n: TEMPERATURES[n] * q @ k,
    ),
    "general": (OTHER, scores.general(WEIGHT), lambda q, k, n: q @ WEIGHT @ k),
    "general per head": (OTHER, scores.general(WEIGHTS), lambda q, k, n: q @ WEIGHTS[n] @ k),
    "additive": (
        OTHER,
        scores.additive(W_QUERY, W_KEY, V),
        lambda q, k, n: V @ np.tanh(q @ W_QUERY + k @ W_KEY),
    ),
    "additive per head": (
        OTHER,
        scores.additive(W_QUERIES, W_KEYS, VS),
        lambda q, k, n: VS[n] @ np.tanh(q @ W_QUERIES[n] + k @ W_KEYS[n]),
    ),
    "additive, relu, mixed": (
        OTHER,
        scores.additive(W_QUERY, W_KEYS, V, activation=jax.nn.relu),
        lambda q, k, n: V @ relu(q @ W_QUERY + k @ W_KEYS[n]),
    ),
    "additive, sigmoid": (
        OTHER,
        scores.additive(W_QUERY, W_KEY, VS, activation=jax.nn.sigmoid),
        lambda q, k, n: VS[n] @ (1 / (1 + np.exp(-(q @ W_QUERY + k @ W_KEY)))),
    ),
    "concat": (
        OTHER,
        scores.concat(JOINED, V),
        lambda q, k, n: V @ np.tanh(np.concatenate([q, k]) @ JOINED),
    ),
    "cosine": (
        KEY,
        scores.cosine(2.0),
        lambda q, k, n: 2 * q @ k / np.linalg.norm(q) / np.linalg.norm(k),
    ),
    "custom": (
        KEY,
        scores.custom(lambda q, k, t, s: q @ k.T + (t[:, None] - s[None, :]).astype(q.dtype)),
        None,
    ),
    "temperature": (
        KEY,
        scores.temperature(scores.dot(), TEMPERATURES),
        lambda q, k, n: q @ k / TEMPERATURES[n],
    ),
    "soft_cap": (
        KEY,
        scores.soft_cap(scores.dot(), 1.5),
        lambda q, k, n: 1.5 * np.tanh(q @ k / 1.5),
    ),
    "clip": (KEY, scores.clip(scores.dot(), -1, 0.5), lambda q, k, n: np.clip(q @ k, -1, 0.5)),
    "log_length": (
        KEY,
        scores.log_length(scores.dot(), 0.5),
        lambda q, k, n: 0.5 * np.log(S) * q @ k,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_formula(name):
    key, score, formula = CASES[name]
    got = score(QUERY, key)
    if formula is None:
        distance = np.arange(T)[:, None] - np.arange(S)
        want = pairs(key, lambda q, k, n: q @ k) + distance
    else:
        want = pairs(key, formula)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_plain_functions_are_the_objects():
    np.testing.assert_array_equal(scores.dot_score(QUERY, KEY), scores.dot()(QUERY, KEY))
    np.testing.assert_array_equal(
        scores.additive_score(QUERY, OTHER, W_QUERY, W_KEY, V),
        scores.additive(W_QUERY, W_KEY, V)(QUERY, OTHER),
    )


def test_a_sum_adds_arrays_and_scores():
    bias = normal(N, T, S)
    got = (scores.dot() + bias + scores.scaled_dot())(QUERY, KEY)
    want = scores.dot()(QUERY, KEY) + bias[None] + scores.scaled_dot()(QUERY, KEY)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_no_batch_and_several():
    one = scores.general(WEIGHT)(QUERY[0], OTHER[0])
    many = scores.general(WEIGHT)(QUERY[None, :, None], OTHER[None, :, None])
    assert many.shape == (1, B, 1, N, T, S)
    np.testing.assert_allclose(many[0, 0, 0], one, rtol=1e-5, atol=1e-6)


def test_repr_is_the_call():
    assert repr(scores.soft_cap(scores.scaled_dot(), 5)) == "soft_cap(score=scaled_dot(), cap=5.0)"
    assert repr(scores.general(WEIGHT)) == "general(weight=float32[4, 3])"


def test_equal_parameters_make_equal_scores():
    assert scores.general(WEIGHT) == scores.general(WEIGHT.copy())
    assert scores.general(WEIGHT) != scores.general(WEIGHT + 1)
    assert scores.dot() != scores.scaled_dot()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_cosine_does_not_depend_on_how_long_vectors_are(size):
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(3, 2, 5)).astype(np.float32) for _ in range(2))

    def pull(query, key):
        out, back = jax.vjp(lambda q: scores.cosine_score(q, key), query)
        return out, back(jnp.ones_like(out))[0]

    out, slope = pull(query, key)
    scaled = np.float32(size)
    got, got_slope = pull(query * scaled, key * scaled)
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_slope * scaled, slope, rtol=1e-4, atol=1e-5)


def test_a_zero_vector_has_cosine_zero_and_no_gradient():
    zero = jnp.zeros((1, 1, 1, H))
    key = jnp.asarray(KEY[:1, :, :1])
    value, slope = jax.value_and_grad(lambda q: scores.cosine()(q, key).sum())(zero)
    assert value == 0
    assert not np.any(slope)


@pytest.mark.parametrize(
    ("score", "key", "message"),
    [
        (scores.dot(), OTHER, r"query depth 4 and key depth 3 must match \(H\)"),
        (scores.general(WEIGHT), KEY, r"weight has shape \[4, 3\].*\[H, Hk\].*\[4, 4\]"),
        (scores.additive(W_QUERY, W_KEY, V[:3]), OTHER, r"w_query has shape \[4, 5\]"),
        (scores.scaled_dot(TEMPERATURES[:4]), KEY, r"scale has shape \[4\].*\[6\]"),
    ],
)
def test_misfits_name_letters_and_numbers(score, key, message):
    with pytest.raises(ValueError, match=message):
        score(QUERY, key)


def test_the_additive_score_of_gatv2_has_slope_0_2():
    q, k = np.random.default_rng(0).normal(size=(2, 5, 1, 4)).astype(np.float32)
    eye, v = np.eye(4, dtype=np.float32), np.linspace(-1, 1, 4, dtype=np.float32)
    leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
    got = scores.additive_score(q, k, eye, eye, v, activation=leaky)
    z = q[:, None] + k[None]
    wanted = (np.where(z > 0, z, 0.2 * z) * v).sum(-1)[..., 0]
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5, atol=1e-6)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="tau must be positive, got 0"):
        scores.temperature(scores.dot(), 0)
    with pytest.raises(ValueError, match="cap must be positive, got -1"):
        scores.soft_cap(scores.dot(), -1)
    with pytest.raises(ValueError, match="low must be below high"):
        scores.clip(scores.dot(), 2, 1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("scale", lambda: scores.scaled_dot("2")),
        ("scale", lambda: scores.cosine([1.0])),
        ("weight", lambda: scores.general([[1.0]])),
        ("weight", lambda: scores.concat(None, np.ones(3))),
        ("w_key", lambda: scores.additive(np.ones((3, 2)), None, np.ones(2))),
        (
            "activation",
            lambda: scores.additive(*[np.ones((2, 2))] * 2, np.ones(2), activation="relu"),
        ),
        ("tau", lambda: scores.temperature(scores.dot(), "1")),
        ("cap", lambda: scores.soft_cap(scores.dot(), np.ones(4))),
        ("low", lambda: scores.clip(scores.dot(), None, 1)),
        ("s", lambda: scores.log_length(scores.dot(), True)),
        ("length", lambda: scores.log_length(scores.dot(), 1.0, "8")),
    ],
)
def test_what_is_no_parameter_is_named_at_once(name, make):
    with pytest.raises(TypeError, match=rf"^{name} must be"):
        make()


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_a_masking_bias_inside_a_scale_by_length(implementation):
    """At position 0 the factor of `log_position` is 0, and 0 · -inf is NaN."""
    x = np.asarray(np.random.default_rng(0).normal(size=(4, 2, 3)), np.float32)
    bias = np.where(np.tri(4, dtype=bool), np.float32(0), -np.inf)
    rows = np.log(np.arange(4) + 1.0)[:, None]
    logits = np.einsum("tnh,snh->nts", x, x) / np.sqrt(3) * rows
    expected = aj.testing.reference_attention(x, x, x, scores=logits, mask=bias == 0)
    score = LogPosition(scores.scaled_dot() + bias, np.float32(1))

    def out(x):
        return aj.attend(x, x, x, score=score, implementation=implementation)

    np.testing.assert_allclose(out(x), expected.out, rtol=1e-5, atol=1e-6)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(out(x) ** 2))(x)).all()
