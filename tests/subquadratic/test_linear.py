"""Linear attention: equal forms, recurrent state, feature maps, linear memory."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import masks
from attention_jax import subquadratic as sq
from attention_jax.testing import reference_subquadratic as oracles

B, T, S, N, K, H, V = 2, 7, 11, 4, 2, 3, 5
RNG = np.random.default_rng(6)


def normals(*shape, scale=1):
    return (scale * RNG.normal(size=shape)).astype(np.float32)


QUERY, KEY, VALUE = normals(B, T, N, H), normals(B, S, K, H), normals(B, S, K, V)
LENGTHS = np.array([11, 4])
SEEN = (np.arange(S) < LENGTHS[:, None])[:, None, None, :]
FAVOR = sq.favor_features(jax.random.key(1), H, 7)


def cosine(x, positions):
    angle = np.pi * positions[:, None] / 32
    x = np.maximum(x, 0)
    return np.concatenate([x * np.cos(angle), x * np.sin(angle)], -1)


def positive(x, projection):
    x = x / x.shape[-1] ** 0.25
    return np.exp(x @ np.float64(projection).T - (x * x).sum(-1, keepdims=True) / 2)


def favor(x, positions):
    return positive(x, FAVOR.projection)


def elu(x, positions):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


MAPS = {
    "relu": (sq.relu_features(0.25), lambda x, p: np.maximum(x, 0) + 0.25),
    "cosine": (sq.cosine_features(16), cosine),
    "favor": (FAVOR, favor),
}
MASKS = {
    "padding": (masks.padding(LENGTHS), SEEN, 0),
    "end": (masks.padding(LENGTHS) & masks.causal("end"), SEEN & np.tri(T, S, S - T, bool), S - T),
    "start": (masks.causal(), np.tri(T, S, dtype=bool), 0),
}
FORMS = [("chunked", 3), ("chunked", None), ("parallel", None), ("recurrent", None)]


@pytest.mark.parametrize("name", MAPS)
def test_all_forms_agree_with_the_definition(name):
    feature_map, features = MAPS[name]

    @jax.jit
    def run(query, key, value):
        return [
            sq.linear_attention(
                query, key, value, feature_map=feature_map, mask=mask, form=form, chunk_size=size
            )
            for mask, _, _ in MASKS.values()
            for form, size in FORMS
        ]

    outs = iter(run(QUERY, KEY, VALUE))
    for _, allowed, start in MASKS.values():
        want = oracles.linear(QUERY, KEY, VALUE, allowed, features, start)
        for _ in FORMS:
            np.testing.assert_allclose(next(outs), want, rtol=2e-5, atol=2e-5)


def test_a_query_before_the_first_key():
    key, value = KEY[:, :4], VALUE[:, :4]
    out = sq.linear_attention(QUERY, key, value, mask=masks.causal("end"), chunk_size=2)
    want = oracles.linear(QUERY, key, value, np.tri(T, 4, -3, bool), elu)
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    assert not np.asarray(out)[:, :3].any()


@pytest.mark.parametrize("name", ["cosine", "favor"])
def test_parts_with_a_state_equal_one_call(name):
    feature_map = MAPS[name][0]
    query = normals(B, S, N, H)

    @jax.jit
    def compare(query, key, value):
        options = {"feature_map": feature_map, "mask": masks.causal()}
        whole, last = sq.linear_attention_with_state(query, key, value, **options)
        out, state = [], None
        for part in (slice(0, 4), slice(4, 9)):
            arrays = query[:, part], key[:, part], value[:, part]
            y, state = sq.linear_attention_with_state(*arrays, state, chunk_size=3, **options)
            out.append(y)

        def step(state, token):
            y, state = sq.linear_attention_step(*token, state, feature_map=feature_map)
            return state, y

        tokens = [jnp.moveaxis(x[:, 9:], 1, 0) for x in (query, key, value)]
        state, ys = jax.lax.scan(step, state, tuple(tokens))
        return whole, jnp.concatenate([*out, jnp.moveaxis(ys, 0, 1)], axis=1), last, state

    whole, parts, last, state = compare(query, KEY, VALUE)
    np.testing.assert_allclose(parts, whole, rtol=2e-5, atol=2e-5)
    assert int(state.index) == int(last.index) == S
    for one, other in zip(jax.tree.leaves(last), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
    first = sq.LinearState.init(B, K, last.numerator.shape[-2], V)
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, last)


def test_without_causal_order_every_query_sees_the_state():
    _, state = sq.linear_attention_with_state(QUERY, KEY[:, :6], VALUE[:, :6])
    out, _ = sq.linear_attention_with_state(QUERY, KEY[:, 6:], VALUE[:, 6:], state)
    np.testing.assert_allclose(out, sq.linear_attention(QUERY, KEY, VALUE), rtol=2e-5, atol=1e-5)


def test_each_row_is_divided_by_its_sum_of_weights():
    key = np.array([[1, 2], [3, 1]], np.float32)[:, None]
    value = np.array([1, 5], np.float32)[:, None, None]
    query = np.ones((2, 1, 2), np.float32)
    for form in ("chunked", "parallel", "recurrent"):
        options = {"feature_map": lambda x: x, "mask": masks.causal(), "form": form}
        out = sq.linear_attention(query, key, value, **options)
        np.testing.assert_allclose(out[:, 0, 0], [1, 23 / 7], rtol=1e-6)


def test_tiny_features_and_zero_features():
    value = np.full((S, K, 1), np.float32(3))
    query, key = np.abs(QUERY[0]), np.abs(KEY[0])

    @jax.jit
    def run(small):
        def out(key):
            return sq.linear_attention(query, key, value, feature_map=lambda x: small * x)

        return out(key), jax.grad(lambda key: out(key).sum())(key)

    for small in (1, 1e-15, 1e-30, 0):
        out, grad = run(small)
        np.testing.assert_allclose(out, 3 if small else 0, rtol=1e-5)
        assert np.isfinite(grad).all()


def test_random_features_converge_to_softmax_attention():
    x, y = (normals(40, 1, 8, scale=0.7).astype(np.float64) for _ in range(2))
    value = normals(40, 1, 3)
    kernel = np.exp(x[:, 0] @ y[:, 0].T / math.sqrt(8))
    norms = np.square(x + y.swapaxes(0, 1)).sum(-1) / math.sqrt(8)
    want = oracles.dense(x[None], y[None], value[None], np.True_)[0]
    # Lemma 2 of the Performer paper: mean square error of independent features.
    bound = np.exp(norms) * kernel**2 * (1 - np.exp(-norms)) / 64
    for orthogonal, most in ((False, 1.2), (True, 0.9)):
        draw = partial(sq.favor_features, depth=8, num_features=64, orthogonal=orthogonal)
        drawn = jax.vmap(draw)(jax.random.split(jax.random.key(2), 100))
        ratios = []
        for projection in np.asarray(drawn.projection):
            q, k = (positive(a[:, 0], projection) for a in (x, y))
            ratios.append(np.mean((q @ k.T / 64 - kernel) ** 2 / bound))
        assert np.mean(ratios) < most
    errors = []
    for number in (64, 4096):
        drawn = sq.favor_features(jax.random.key(2), 8, number)
        arrays = (a.astype(np.float32) for a in (x, y, value))
        out = sq.linear_attention(*arrays, feature_map=drawn)
        errors.append(np.abs(out - want).mean())
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 3  # an eighth in expectation


def test_random_features_are_redrawn_and_orthogonal():
    drawn = sq.favor_features(jax.random.key(2), 5, 12)
    other = drawn.redraw(jax.random.key(3))
    assert other.projection.shape == (12, 5)
    assert not np.allclose(other.projection, drawn.projection)
    assert drawn.redraw(jax.random.key(2)) == drawn
    products = np.asarray(drawn.projection[:5] @ drawn.projection[:5].T)
    np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-5)
    assert repr(drawn) == "favor_features(projection=float32[12, 5])"


def test_random_features_do_not_underflow_for_large_norms():
    query, key = 30 * QUERY, 30 * KEY
    ones = np.ones_like(VALUE)
    options = {"feature_map": FAVOR, "chunk_size": 3, "mask": masks.causal()}
    out = sq.linear_attention(query, key, ones, **options)
    np.testing.assert_allclose(out, 1, rtol=1e-5)


def test_memory_is_linear_in_the_length_forward_and_backward():
    def bytes_of(length, gradient):
        shape = jax.ShapeDtypeStruct((length, 1, 32), np.float32)

        def total(query, key, value):
            return sq.linear_attention(query, key, value, mask=masks.causal()).sum()

        run = jax.grad(total, argnums=(0, 1, 2)) if gradient else total
        compiled = jax.jit(run).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for gradient in (False, True):
        small, large = (bytes_of(length, gradient) for length in (2048, 4096))
        assert large <= 2.2 * small
        assert large <= 8 * 4 * 4096 * 32  # eight arrays like the query; all pairs are 128


def test_mistakes():
    arrays = QUERY, KEY, VALUE
    for options, text in (
        ({"form": "quadratic"}, "form must be one of"),
        ({"form": "parallel", "chunk_size": 4}, "takes no chunk_size"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"feature_map": sq.favor_features(jax.random.key(0), H + 1, 4)}, "depth 4"),
        ({"feature_map": sq.cosine_features(10)}, "too short for length 11"),
        ({"feature_map": lambda x: x[..., 0, :]}, r"\[..., F\]"),
    ):
        with pytest.raises(ValueError, match=text):
            sq.linear_attention(*arrays, **options)
    with pytest.raises(TypeError, match="feature_map"):
        sq.linear_attention(*arrays, feature_map="elu")
    with pytest.raises(ValueError, match=r"state.numerator has shape"):
        sq.linear_attention_with_state(*arrays, sq.LinearState.init(B, K, H, V + 1))
    with pytest.raises(TypeError, match="LinearState"):
        sq.linear_attention_with_state(*arrays, (1, 2))
    with pytest.raises(ValueError, match="offset"):
        sq.relu_features(-1)
    assert repr(sq.elu_features()) == "elu_features()"
    assert repr(sq.cosine_features(8)) == "cosine_features(8)"
