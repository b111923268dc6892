"""What is known at construction is said there; and how parameters start (cases A27, A32)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import nnx as modules
from attention_jax.layers import recipes
from attention_jax.layers.arguments import check_activation, check_implementation
from attention_jax.nnx import (
    MultiHeadAttention,
    Transformer,
    TransformerDecoder,
    TransformerEncoderLayer,
)
from attention_jax.nnx.randomness import check_rngs

X = jnp.ones((2, 5, 8))


def _attention(*arguments, **options):
    return MultiHeadAttention(*arguments, rngs=nnx.Rngs(0), **options)


def _model(**options):
    sizes = {"source_vocab": 5, "target_vocab": 6}
    return Transformer(1, 2, 8, 16, **{**sizes, **options}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _attention(2, 8, score=lambda heads, depth, rngs: 1), ["factory", "Score", "int"]),
        (
            lambda: TransformerEncoderLayer(2, 8, 16, mistake=1, rngs=nnx.Rngs(0)),
            ["TransformerEncoderLayer got", "mistake"],
        ),
        (lambda: _model(mistake=1), ["Transformer got", "mistake"]),
        (
            lambda: modules.TransformerLM(1, 2, 8, 16, 9, normalise_qk=True, rngs=nnx.Rngs(0)),
            ["TransformerLM got", "'normalise_qk'", "'normalize_qk'"],
        ),
        (
            lambda: TransformerDecoder(1, 2, 8, 16, normalise_qk=True, rngs=nnx.Rngs(0)),
            ["TransformerDecoder got", "'normalise_qk'"],
        ),
        (lambda: modules.TransformerLM(1, 2, 8, 16, 9, rngs=jax.random.key(0)), ["rngs"]),
        (lambda: MultiHeadAttention(2, 8, rngs=jax.random.key(0)), ["rngs"]),
        (lambda: check_rngs("Layer", 0), ["Layer", "rngs", "flax.nnx.Rngs", "int"]),
        (lambda: check_activation("gelu"), ["activation must be a function", "'gelu'"]),
        (lambda: check_implementation(3), ["implementation", "int"]),
    ],
)
def test_wrong_kinds(make, words):
    with pytest.raises(TypeError) as raised:
        make()
    for word in words:
        assert word in str(raised.value)


def test_initialisers_of_the_articles():
    layer = MultiHeadAttention(
        8,
        64,
        kernel_init=modules.xavier_init(),
        out_kernel_init=modules.small_init(64, num_layers=4),
        rngs=nnx.Rngs(0),
    )
    query, out = (np.asarray(layer.query.kernel[...]), np.asarray(layer.out.kernel[...]))
    assert 0.95 < np.abs(query).max() / np.sqrt(6 / 128) <= 1
    assert abs(out.std() / np.sqrt(2 / (5 * 64 * 8)) - 1) < 0.05


def test_unit_variance_in_unit_variance_out():
    layer = MultiHeadAttention(8, 64, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 64)), jnp.float32)
    assert abs(float(layer.query(x).std()) - 1) < 0.03


@pytest.mark.parametrize(
    ("score", "name", "fan"),
    [
        (modules.additive(256), "w_query", 64),
        (modules.additive(256, shared=True), "w_key", 64),
        (modules.additive(256), "v", 256),
        (modules.concat(256), "weight", 128),
        (modules.general(), "weight", 64 * 64),
    ],
)
def test_scores_start_with_their_own_fan(score, name, fan):
    layer = MultiHeadAttention(8, 512, score=score, rngs=nnx.Rngs(0))
    parameter = np.asarray(getattr(layer.score, name)[...])
    assert abs(parameter.std() * np.sqrt(fan) - 1) < 0.05


def test_the_general_score_starts_at_the_scaled_dot_s_variance():
    sizes = recipes.Sizes(4, 32, 32)
    draws = recipes.General().parameters(sizes)
    score = recipes.General().build({"weight": draws["weight"](jax.random.key(0))})
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(100, 4, 32)), jnp.float32) for _ in range(2))
    assert abs(float(score(query, key).std()) - 1) < 0.1


def test_kernel_init_and_param_dtype_reach_the_score():
    layer = MultiHeadAttention(
        2,
        8,
        score="concat",
        kernel_init=nnx.initializers.constant(0.5),
        param_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    for name in ("weight", "v"):
        parameter = getattr(layer.score, name)[...]
        assert parameter.dtype == jnp.bfloat16
        np.testing.assert_array_equal(parameter.astype(jnp.float32), 0.5)


def test_the_learned_scale_starts_where_it_is_said_to():
    for start in (0.01, 1.0, 10.0, 50.0):
        layer = MultiHeadAttention(2, 8, score=modules.cosine(start), rngs=nnx.Rngs(0))
        np.testing.assert_allclose(layer.score().scale, start, rtol=1e-4)
    default = MultiHeadAttention(2, 8, score="cosine", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(default.score().scale, 10.0, rtol=1e-5)


@nnx.jit
def _scaled(layer, x):
    def loss(layer):
        return jnp.sum(layer(x) ** 2)

    return layer.attention_weights(x), nnx.grad(loss)(layer)["score"]["raw_scale"]


def test_no_raw_scale_flips_a_preference():
    """Case A32."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), jnp.float32)
    layer = MultiHeadAttention(1, 8, score="cosine", rngs=nnx.Rngs(0))
    best = np.argmax(_scaled(layer, x)[0], -1)
    for raw in (-1e4, -100.0, -3.0, 0.0, 3.0, 100.0, 1e4):
        layer.score.raw_scale[...] = jnp.array([raw])
        assert float(layer.score().scale[0]) > 0
        weights, gradient = _scaled(layer, x)
        np.testing.assert_array_equal(np.argmax(weights, -1), best, err_msg=str(raw))
        assert np.all(np.isfinite(gradient[...])), raw


def test_equal_layers_have_equal_structure():
    """What is compiled for one layer serves another made alike."""
    traces = []

    @nnx.jit
    def run(layer, x):
        traces.append(1)
        return layer(x)

    for seed in (0, 1):
        score, mask = modules.additive(4), aj.masks.causal()
        run(MultiHeadAttention(2, 8, score=score, mask=mask, rngs=nnx.Rngs(seed)), X)
    assert len(traces) == 1


def test_recipes_read_like_the_call_that_made_them():
    assert repr(modules.additive(8)) == "additive(hidden_features=8)"
    assert repr(modules.concat(shared=True)) == "concat(shared=True)"
    assert repr(modules.scaled_dot()) == "scaled_dot()"
    assert repr(modules.scaled_dot(0.5)) == "scaled_dot(scale=0.5)"
    assert repr(modules.general()) == "general()"
    assert repr(modules.cosine()) == "cosine()"
    assert repr(modules.additive(activation=jax.nn.relu)) == "additive(activation=relu)"


def test_metadata_is_a_mapping():
    with pytest.raises(TypeError, match="kernel_metadata must be a mapping or None, got str"):
        MultiHeadAttention(2, 8, kernel_metadata="sharded", rngs=nnx.Rngs(0))
