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
    AdditiveAttention,
    MultiHeadAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
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
        (lambda: _attention(3, 8), ["qkv_features 8", "num_heads 3", "(D)", "(N)"]),
        (lambda: _attention(2, 8, 9), ["qkv_features 9", "num_heads 2"]),
        (lambda: _attention(6, 12, num_kv_heads=4), ["num_heads 6", "num_kv_heads 4", "(K)"]),
        (lambda: _attention(0, 8), ["num_heads", "0"]),
        (lambda: _attention(2, 8, num_kv_heads=0), ["num_kv_heads", "0"]),
        (lambda: _attention(2, 8, dropout_rate=1.0), ["dropout_rate", "[0, 1)", "1.0"]),
        (lambda: _attention(2, 8, dropout_rate=-0.1), ["dropout_rate", "-0.1"]),
        (
            lambda: _attention(2, 8, score="bilinear"),
            ["'bilinear'", "dot", "scaled_dot", "general", "additive", "concat", "cosine"],
        ),
        (lambda: modules.additive(0), ["hidden_features", "0"]),
        (lambda: modules.concat(-1), ["hidden_features", "-1"]),
        (lambda: modules.cosine(0.0), ["initial_scale", "0.0"]),
        (lambda: AdditiveAttention(4, 4, 0, rngs=nnx.Rngs(0)), ["hidden_features", "0"]),
        (
            lambda: AdditiveAttention(4, 4, 3, dropout_rate=2.0, rngs=nnx.Rngs(0)),
            ["dropout_rate", "2.0"],
        ),
        (
            lambda: TransformerEncoderLayer(2, 8, 16, norm="middle", rngs=nnx.Rngs(0)),
            ["norm", "'post'", "'pre'", "'middle'"],
        ),
        (
            lambda: TransformerEncoderLayer(2, 8, 16, dropout_rate=1.5, rngs=nnx.Rngs(0)),
            ["dropout_rate", "1.5"],
        ),
        (
            lambda: TransformerDecoderLayer(2, 8, 16, cross_attention="none", rngs=nnx.Rngs(0)),
            ["cross_attention", "'attention'", "'mean'", "'none'"],
        ),
        (
            lambda: _model(cross_attention="mean", cross_score="dot"),
            ["cross_score", "mean"],
        ),
        (lambda: _model(share_embedding=True), ["source_vocab 5", "target_vocab 6"]),
        (lambda: _model(target_vocab=0), ["target_vocab", "0"]),
        (lambda: TransformerDecoder(0, 2, 8, 16, rngs=nnx.Rngs(0)), ["num_layers", "0"]),
        (lambda: _attention(2, 8, implementation="xla"), ["implementation", "'xla'", "'dense'"]),
        (lambda: _attention(2, 8, implementation=()), ["implementation", "empty"]),
        (
            lambda: modules.MeanAttention(8, implementation=("dense", "xla"), rngs=nnx.Rngs(0)),
            ["implementation", "'xla'"],
        ),
        (lambda: modules.attention_fn(implementation="xla"), ["implementation", "'xla'"]),
    ],
)
def test_wrong_sizes_rates_and_names(make, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
        make()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _attention(2, 8, score=3.0), ["score", "float"]),
        (lambda: _attention(2, 8, score=lambda heads, depth, rngs: 1), ["factory", "Score", "int"]),
        (lambda: _attention(2, 8, mask=jnp.ones((5, 5))), ["bias"]),
        (lambda: _attention(2.0, 8), ["num_heads", "float"]),
        (lambda: _attention(2, 8, mistake=1), ["mistake"]),
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
        (lambda: _model(activation="gelu"), ["activation", "'gelu'"]),
        (lambda: check_activation("gelu"), ["activation must be a function", "'gelu'"]),
        (lambda: check_implementation(3), ["implementation", "int"]),
    ],
)
def test_wrong_kinds(make, words):
    with pytest.raises(TypeError) as raised:
        make()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m(jnp.ones((5, 7))), ValueError, ["inputs_q", "8", "[5, 7]"]),
        (lambda m: m(X, jnp.ones((2, 5, 3))), ValueError, ["inputs_k", "8", "[2, 5, 3]"]),
        (lambda m: m(X, X, jnp.ones((2, 5, 3))), ValueError, ["inputs_v", "8", "[2, 5, 3]"]),
        (lambda m: m(X, inputs_v=X), ValueError, ["inputs_v", "inputs_k"]),
        (lambda m: m(jnp.ones(8)), ValueError, ["inputs_q", "[8]"]),
        (lambda m: m(X, X[:1]), ValueError, ["batch", "*B"]),
        (lambda m: m(X, X, X[:, :3]), ValueError, ["length", "5", "3"]),
        (lambda m: m(X.astype(int)), TypeError, ["inputs_q", "int"]),
        (lambda m: m(X, mask=jnp.ones((5, 5))), TypeError, ["mask", "bias"]),
        (lambda m: m(X, bias=jnp.ones((5, 5), bool)), TypeError, ["bias", "bool"]),
        (lambda m: m(X, mask=jnp.ones((5, 4), bool)), ValueError, ["mask", "[5, 4]"]),
    ],
)
def test_wrong_inputs(call, error, words):
    with pytest.raises(error) as raised:
        call(_attention(2, 8))
    for word in words:
        assert word in str(raised.value)


def test_wrong_tokens_and_masks_of_a_model():
    model, ids = _model(), jnp.ones((2, 3), int)
    with pytest.raises(TypeError, match="source"):
        model(ids.astype(jnp.float32), ids)
    with pytest.raises(TypeError, match="target"):
        model(ids, ids > 0)
    with pytest.raises(ValueError, match=r"source_mask.*\[2, 4\].*\[2, 3\]"):
        model(ids, ids, jnp.ones((2, 4), bool))
    with pytest.raises(TypeError, match="bias"):
        model(ids, ids, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"memory.*8.*\[2, 3, 7\]"):
        model.decode(ids, jnp.ones((2, 3, 7)))


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
def test_projections_start_with_the_fan_of_a_matrix(name):
    """Case A27: the convolution rule would give kernels 2.83 times too small."""
    layer = MultiHeadAttention(8, 512, rngs=nnx.Rngs(0))
    kernel = np.asarray(getattr(layer, name).kernel[...])
    assert kernel.shape == ((8, 64, 512) if name == "out" else (512, 8, 64))
    assert abs(kernel.std() * np.sqrt(512) - 1) < 0.03


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
