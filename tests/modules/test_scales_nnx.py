"""Scales as scores of a layer: learned, held by entropy, by length (case A32)."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import nnx as modules
from attention_jax.nnx import MultiHeadAttention, TransformerLM

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)


def _layer(score, **options):
    return MultiHeadAttention(2, 8, score=score, **options, rngs=nnx.Rngs(0))


@nnx.jit
def _look(layer, x):
    return layer.attention_weights(x)


@nnx.jit
def _slope(layer, x):
    return nnx.grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)["score"]["raw_scale"][...]


def test_a_learned_scale_starts_as_the_fixed_one():
    fixed = _look(_layer("scaled_dot"), X)
    for per, shape in (("head", (2,)), ("layer", ())):
        layer = _layer(modules.learned_scale(per=per))
        assert layer.score.raw_scale[...].shape == shape
        np.testing.assert_allclose(_look(layer, X), fixed, rtol=1e-4, atol=1e-5)
    tripled = _layer(modules.learned_scale("cosine", initial=3.0))
    assert set(tripled.score.names) == {"score_raw_scale", "raw_scale"}
    cosine = _layer(modules.cosine(30.0))
    np.testing.assert_allclose(_look(tripled, X), _look(cosine, X), rtol=1e-3, atol=1e-5)


def test_no_raw_scale_flips_a_preference():
    layer = _layer(modules.learned_scale())
    best = np.argmax(_look(layer, X), -1)
    assert float(jnp.abs(_slope(layer, X)).min()) > 0
    for raw in (-1e4, -3.0, 0.0, 3.0, 1e4):
        layer.score.raw_scale[...] = jnp.full((2,), raw)
        np.testing.assert_array_equal(np.argmax(_look(layer, X), -1), best, err_msg=str(raw))
        assert np.all(np.isfinite(_slope(layer, X))), raw


def test_the_entropy_comes_to_its_target_in_training_alone():
    target = 0.8
    layer = _layer(modules.entropy_scale(target, rate=0.5), normalize_qk=True)
    fixed = _look(_layer("scaled_dot", normalize_qk=True), X)
    np.testing.assert_allclose(_look(layer, X), fixed, rtol=1e-4, atol=1e-5)
    held = nnx.jit(lambda layer, x: layer.with_stats(x, deterministic=True)[1])
    assert not jnp.allclose(held(layer, X).entropy.mean((0, 2)), target, atol=0.05)

    @nnx.jit
    def train(layer, x):
        return layer(x, deterministic=False)

    for _ in range(40):
        train(layer, X)
    np.testing.assert_allclose(held(layer, X).entropy.mean((0, 2)), target, atol=0.05)
    before = layer.score.log_scale[...]
    held(layer, X)
    np.testing.assert_array_equal(layer.score.log_scale[...], before)
    assert not any(
        "log_scale" in str(path) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    )


def test_the_state_of_scanned_and_recomputed_layers_moves_alike():
    def scales(**options):
        model = TransformerLM(
            2, 2, 8, 16, 9, score=modules.entropy_scale(0.5), **options, rngs=nnx.Rngs(0)
        )
        tokens = jnp.arange(6)[None]
        nnx.jit(lambda model: model(tokens, deterministic=False))(model)
        states = nnx.to_flat_state(nnx.state(model, modules.scores.Adapted))
        return np.concatenate([np.ravel(leaf[...]) for _, leaf in states])

    plain = scales()
    assert np.all(plain != np.log(0.5))
    np.testing.assert_allclose(scales(scan_layers=True, remat=True), plain, rtol=1e-5)


def test_log_length_by_keys_and_by_position():
    plain = _layer("scaled_dot").score()
    keys = _layer(modules.log_length(train_length=6, learn=True))
    np.testing.assert_allclose(_look(keys, X), _look(_layer("scaled_dot"), X), rtol=1e-4, atol=1e-5)
    position = _layer(modules.log_length(train_length=6, causal=True)).score()
    query = X.reshape(2, 6, 2, 4)
    expected = np.asarray(plain(query, query)) * (np.log(np.arange(6) + 1) / np.log(6))[
        :, None
    ].astype("f4")
    np.testing.assert_allclose(position(query, query), expected, rtol=1e-5, atol=1e-6)
    layer = _layer(modules.log_length("additive", train_length=4, causal=True))

    @nnx.jit
    def run(layer, x):
        out, cache = layer.with_cache(x[:, :5], layer.new_cache(2, 9))
        last, _ = layer.with_cache(x[:, 5:], cache)
        return jnp.concatenate([out, last], 1), layer(x, is_causal=True)

    np.testing.assert_allclose(*run(layer, X), rtol=1e-4, atol=1e-5)


def test_log_length_counts_the_tokens_so_far_in_a_cache():
    """A prompt gives what it gives alone, and a step the last row; `causal` ends as in a step."""
    mask = aj.masks.causal(align="end")
    layer = _layer(modules.log_length(train_length=4, learn=True), mask=mask)

    @nnx.jit
    def run(layer, x):
        out, cache = layer.with_cache(x[:, :5], layer.new_cache(2, 9))
        last, _ = layer.with_cache(x[:, 5:], cache)
        return (out, last), (layer(x[:, :5]), layer(x)[:, 5:])

    chex.assert_trees_all_close(*run(layer, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: modules.learned_scale(per="row"), ["per", "'head'", "'layer'", "'row'"]),
        (lambda: modules.learned_scale(initial=0.0), ["initial", "0.0"]),
        (lambda: modules.learned_scale("bilinear"), ["'bilinear'"]),
        (lambda: modules.entropy_scale(-1.0), ["target", "-1.0"]),
        (lambda: modules.entropy_scale(1.0, rate=0), ["rate", "0"]),
        (lambda: modules.log_length(train_length=1), ["train_length", "1"]),
    ],
)
def test_bad_use(make, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
        make()
    for word in words:
        assert word in str(raised.value)


def test_recipes_read_like_the_call_that_made_them():
    assert repr(modules.entropy_scale(1.5)) == "entropy_scale(score=dot(), target=1.5)"
    assert repr(modules.learned_scale("general")) == "learned_scale(score=general())"
