"""The layers and the model: written out again in NumPy-like steps, and what they promise."""

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import (
    MeanAttention,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    additive,
)

SOURCE = jnp.array([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 5, 4, 3, 2], [1, 6, 7, 8, 2]])


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _model(layers=1, **options):
    return Transformer(layers, 2, 8, 16, 11, 13, rngs=nnx.Rngs(0), **options)


@nnx.jit
def _run(model, source, target, mask=None):
    return model(source, target, mask)


def _layer_norm(norm, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    scaled = (x - mean) / np.sqrt(variance + 1e-6)
    return scaled * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])


def _network(mlp, x):
    hidden = x @ np.asarray(mlp.hidden.kernel[...]) + np.asarray(mlp.hidden.bias[...])
    return np.maximum(hidden, 0) @ np.asarray(mlp.out.kernel[...]) + np.asarray(mlp.out.bias[...])


def _spread(layer):
    """Gives norms and biases values that are not 0 and 1, so that leaving one out shows."""
    leaves, structure = jax.tree.flatten(nnx.state(layer, nnx.Param))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    nnx.update(layer, structure.unflatten(noisy))
    return layer


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_an_encoder_layer_written_out(norm):
    layer = _spread(TransformerEncoderLayer(2, 8, 16, norm=norm, rngs=nnx.Rngs(0)))
    x, mask = _normal(2, 5, 8), aj.masks.padding(jnp.array([5, 3]))
    attention = lambda x: np.asarray(layer.self_attention(jnp.asarray(x, jnp.float32), mask=mask))  # noqa: E731
    expected = np.asarray(x)
    if norm == "post":
        expected = _layer_norm(layer.self_attention_norm, expected + attention(expected))
        expected = _layer_norm(layer.mlp_norm, expected + _network(layer.mlp, expected))
    else:
        expected = expected + attention(_layer_norm(layer.self_attention_norm, expected))
        expected = expected + _network(layer.mlp, _layer_norm(layer.mlp_norm, expected))
    np.testing.assert_allclose(layer(x, mask), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer(x, mask.to_array(5, 5)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("cross", ["attention", "mean"])
def test_a_decoder_layer_written_out(norm, cross):
    layer = _spread(
        TransformerDecoderLayer(2, 8, 16, norm=norm, cross_attention=cross, rngs=nnx.Rngs(0))
    )
    x, memory = _normal(2, 5, 8), _normal(2, 7, 8, seed=1)
    memory_mask = aj.masks.padding(jnp.array([7, 3]))
    causal = jnp.tril(jnp.ones((5, 5), bool))

    def itself(x):
        return np.asarray(layer.self_attention(jnp.asarray(x, jnp.float32), mask=causal))

    def look(x):
        if cross == "attention":
            x = jnp.asarray(x, jnp.float32)
            return np.asarray(layer.cross_attention(x, memory, mask=memory_mask))
        mean = np.stack([np.asarray(memory[0]).mean(0), np.asarray(memory[1, :3]).mean(0)])
        parts = layer.cross_attention
        value = mean @ np.asarray(parts.value.kernel[...]) + np.asarray(parts.value.bias[...])
        return (value @ np.asarray(parts.out.kernel[...]) + np.asarray(parts.out.bias[...]))[
            :, None
        ]

    expected = np.asarray(x)
    steps = (
        (layer.self_attention_norm, itself),
        (layer.cross_attention_norm, look),
        (layer.mlp_norm, lambda x: _network(layer.mlp, x)),
    )
    for this, step in steps:
        if norm == "post":
            expected = _layer_norm(this, expected + step(expected))
        else:
            expected = expected + step(_layer_norm(this, expected))
    np.testing.assert_allclose(layer(x, memory, None, memory_mask), expected, rtol=1e-4, atol=1e-5)
    with_weights, weights = layer.with_weights(x, memory, memory_mask=memory_mask)
    with_stats, stats = layer.with_stats(x, memory, memory_mask=memory_mask)
    np.testing.assert_allclose(with_weights, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(with_stats, expected, rtol=1e-4, atol=1e-5)
    assert weights.shape == (2, 1 if cross == "mean" else 2, 5, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    np.testing.assert_array_equal(weights[1, :, :, 3:], 0)
    entropy = -np.sum(
        np.where(weights > 0, weights * np.log(np.where(weights > 0, weights, 1)), 0), -1
    )
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-4, atol=1e-5)


def test_the_mean_looks_at_all_alike():
    layer = MeanAttention(8, 6, rngs=nnx.Rngs(0))
    query, states = _normal(2, 5, 8), _normal(2, 7, 6, seed=1)
    mask = aj.masks.padding(jnp.array([7, 3]))
    np.testing.assert_allclose(layer(query, states, mask=mask), layer(query * 3, states, mask=mask))
    weights = layer.attention_weights(query, states, mask=mask)
    np.testing.assert_allclose(weights[1, 0, :, :3], 1 / 3, rtol=1e-6)
    out, stats = layer.with_stats(query, states, mask=mask)
    np.testing.assert_allclose(out, layer(query, states, mask=mask), atol=1e-6)
    np.testing.assert_allclose(stats.entropy[:, 0, 0], np.log([7, 3]), rtol=1e-5)
    empty = layer(query, states, mask=aj.masks.padding(jnp.array([0, 3])))
    np.testing.assert_array_equal(empty[0], jnp.broadcast_to(layer.out.bias[...], (5, 8)))


def test_stacks_are_their_layers_one_after_the_other():
    x, memory = _normal(2, 5, 8), _normal(2, 7, 8, seed=1)
    for norm in ("post", "pre"):
        encoder = _spread(TransformerEncoder(2, 2, 8, 16, norm=norm, rngs=nnx.Rngs(0)))
        decoder = _spread(TransformerDecoder(2, 2, 8, 16, norm=norm, rngs=nnx.Rngs(0)))
        encoded = encoder.layers[1](encoder.layers[0](x))
        decoded = decoder.layers[1](decoder.layers[0](x, memory), memory)
        if norm == "pre":
            encoded = _layer_norm(encoder.norm, np.asarray(encoded))
            decoded = _layer_norm(decoder.norm, np.asarray(decoded))
        np.testing.assert_allclose(encoder(x), encoded, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(decoder(x, memory), decoded, rtol=1e-4, atol=1e-5)
        assert (encoder.norm is None) == (norm == "post")


def _sinusoidal(length, features):
    places = np.arange(length)[:, None] / 10000 ** (np.arange(0, features, 2)[None] / features)
    return np.stack([np.sin(places), np.cos(places)], -1).reshape(length, features)


@pytest.mark.parametrize("tie_output", [True, False])
def test_a_model_written_out(tie_output):
    model = _model(tie_output=tie_output, cross_score=additive(4))
    embedding = np.asarray(model.source_embedding.embedding[...])
    assert abs(embedding.std() * np.sqrt(8) - 1) < 0.25
    x = embedding[np.asarray(SOURCE)] * np.sqrt(8) + _sinusoidal(7, 8)
    mask = aj.masks.from_array((SOURCE > 0)[:, None, None, :])
    memory = model.encoder(jnp.asarray(x, jnp.float32), mask)
    np.testing.assert_allclose(model.encode(SOURCE, SOURCE > 0), memory, rtol=1e-4, atol=1e-5)
    y = np.asarray(model.target_embedding.embedding[...])[np.asarray(TARGET)] * np.sqrt(8)
    states = model.decoder(jnp.asarray(y + _sinusoidal(5, 8), jnp.float32), memory, None, mask)
    kernel = model.target_embedding.embedding[...].T if tie_output else model.output.kernel[...]
    np.testing.assert_allclose(
        model(SOURCE, TARGET, SOURCE > 0), states @ kernel, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        model.decode(TARGET, memory, memory_mask=SOURCE > 0), states @ kernel, rtol=1e-4, atol=1e-5
    )
    assert (model.output is None) == tie_output


@pytest.mark.parametrize(
    "cross", [{"cross_score": "general"}, {"cross_attention": "mean"}], ids=str
)
def test_padding_changes_nothing(cross):
    """Case A01: the padded pair equals the pair alone, gradients too."""
    model = _model(**cross)

    def loss(model, source, target, source_mask, target_mask):
        logits = model(source, target, source_mask, target_mask)
        real = jnp.ones(target.shape, bool) if target_mask is None else target_mask
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(real, picked, 0.0))

    gradient, value = nnx.jit(nnx.value_and_grad(loss)), nnx.jit(loss)
    target = TARGET[1:].at[:, 3:].set(0)
    real = jnp.arange(5)[None] < 3
    padded = gradient(model, SOURCE[1:], target, SOURCE[1:] > 0, real)
    alone = gradient(model, SOURCE[1:, :3], TARGET[1:, :3], None, None)
    np.testing.assert_allclose(padded[0], alone[0], rtol=1e-5)
    chex.assert_trees_all_close(
        nnx.to_pure_dict(padded[1]), nnx.to_pure_dict(alone[1]), rtol=1e-3, atol=1e-5
    )
    if "cross_attention" in cross:
        return
    by_length = value(model, SOURCE[1:], target, aj.masks.padding(jnp.array([3])), real)
    np.testing.assert_allclose(by_length, alone[0], rtol=1e-5)
    assert not np.allclose(value(model, SOURCE[1:], target, None, real), alone[0], rtol=1e-4)


def test_a_sentence_that_is_all_padding_stays_finite():
    model = _model()
    mask = jnp.zeros(SOURCE.shape, bool).at[0].set(True)

    def loss(model):
        return jnp.sum(model(SOURCE, TARGET, mask, jnp.zeros(TARGET.shape, bool)) ** 2)

    value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("cross", [{}, {"cross_attention": "mean"}], ids=["attention", "mean"])
def test_the_decoder_does_not_look_ahead_and_sees_the_whole_source(cross):
    model = _model(**cross)
    before = np.asarray(_run(model, SOURCE, TARGET, SOURCE > 0))
    for place in range(5):
        after = _run(model, SOURCE, TARGET.at[:, place].set(12), SOURCE > 0)
        changed = np.any(before != np.asarray(after), -1)
        np.testing.assert_array_equal(changed, np.broadcast_to(np.arange(5) >= place, (2, 5)))
    for place in range(7):
        after = _run(model, SOURCE.at[:, place].set(10), TARGET, SOURCE > 0)
        changed = np.any(before != np.asarray(after), -1)
        np.testing.assert_array_equal(
            changed, np.asarray(SOURCE > 0)[:, place, None] & np.ones(5, bool)
        )


def test_batch_axes_are_free():
    model = _model()
    together = _run(model, SOURCE, TARGET, SOURCE > 0)
    alone = _run(model, SOURCE[1], TARGET[1], SOURCE[1] > 0)
    np.testing.assert_allclose(together[1], alone, rtol=1e-5, atol=1e-5)
    four = _run(model, SOURCE[None], TARGET[None], (SOURCE > 0)[None])
    np.testing.assert_allclose(four[0], together, rtol=1e-5, atol=1e-5)


def test_masks_may_be_objects_token_masks_or_masks_of_pairs():
    model = _model()
    expected = _run(model, SOURCE, TARGET, aj.masks.padding(jnp.array([7, 3])))
    for mask in (SOURCE > 0, (SOURCE > 0)[:, None, None, :], np.asarray(SOURCE > 0)):
        np.testing.assert_allclose(
            _run(model, SOURCE, TARGET, mask), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("cross", [{"cross_score": "cosine"}, {"cross_attention": "mean"}], ids=str)
def test_pictures_and_statistics_of_cross_attention(cross):
    model = _model(layers=2, norm="pre", **cross)
    heads = 1 if "cross_attention" in cross else 2
    look = nnx.jit(lambda m, *a: (m.cross_attention_weights(*a), m.cross_attention_stats(*a)))
    weights, stats = look(model, SOURCE, TARGET, SOURCE > 0)
    assert weights.shape == (2, 2, heads, 5, 7)
    assert stats.entropy.shape == stats.lse.shape == stats.max_logit.shape == (2, 2, heads, 5)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    np.testing.assert_array_equal(weights[:, 1, ..., 3:], 0)
    logs = jnp.where(weights > 0, jnp.log(jnp.where(weights > 0, weights, 1.0)), 0.0)
    np.testing.assert_allclose(stats.entropy, -jnp.sum(weights * logs, -1), rtol=1e-3, atol=1e-4)
    # The first layer's picture, made by hand.
    first = model.decoder.layers[0]
    y = (
        model.target_embedding(TARGET) * np.sqrt(8)
        + jnp.asarray(_sinusoidal(5, 8), jnp.float32)[None]
    )
    memory = model.encode(SOURCE, SOURCE > 0)
    y = y + first.self_attention(first.self_attention_norm(y))
    mask = aj.masks.padding(jnp.array([7, 3]))
    picture = first.cross_attention.attention_weights(
        first.cross_attention_norm(y), memory, mask=mask
    )
    np.testing.assert_allclose(weights[0], picture, rtol=1e-4, atol=1e-5)


def test_statistics_keep_nothing_of_size_t_s():
    model = _model(implementation="blockwise", block_size=16)
    graph, state = nnx.split(model)
    ids = jnp.ones(96, int)

    def run(state, ids):
        return nnx.merge(graph, state).cross_attention_stats(ids, ids).entropy

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    assert max(sizes(jax.make_jaxpr(run)(state, ids).jaxpr)) < 96 * 96


def test_scores_are_chosen_apart():
    model = _model(layers=2, score="general", cross_score=additive(3))
    layer = model.decoder.layers[1]
    assert repr(layer.self_attention.score.recipe) == "general()"
    assert layer.cross_attention.score.w_query.shape == (2, 4, 3)
    assert repr(model.encoder.layers[0].self_attention.score.recipe) == "general()"


def test_one_embedding_for_both_languages():
    model = Transformer(1, 2, 8, 16, 13, 13, share_embedding=True, rngs=nnx.Rngs(0))
    assert model.source_embedding is model.target_embedding
    own = Transformer(1, 2, 8, 16, 13, 13, rngs=nnx.Rngs(0))
    count = lambda m: sum(x.size for x in jax.tree.leaves(nnx.state(m, nnx.Param)))  # noqa: E731
    assert count(own) - count(model) == 13 * 8


def test_mixed_precision():
    options = {"norm": "pre", "cross_score": "additive"}
    model = _model(**options, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    chex.assert_type(jax.tree.leaves(nnx.state(model, nnx.Param)), jnp.float32)

    def loss(model):
        memory = model.encode(SOURCE, SOURCE > 0)
        logits = model.decode(TARGET, memory, memory_mask=SOURCE > 0)
        return jnp.sum(logits.astype(jnp.float32) ** 2), (logits, memory)

    gradients, outputs = nnx.jit(nnx.grad(loss, has_aux=True))(model)
    chex.assert_type(outputs, jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(gradients), jnp.float32)
    full = _run(_model(**options), SOURCE, TARGET, SOURCE > 0)
    np.testing.assert_allclose(outputs[0].astype(jnp.float32), full, atol=0.1)


def test_low_precision_parameters():
    model = _model(param_dtype=jnp.bfloat16, norm="pre", tie_output=False)
    chex.assert_type(jax.tree.leaves(nnx.state(model, nnx.Param)), jnp.bfloat16)
    chex.assert_type(_run(model, SOURCE, TARGET), jnp.bfloat16)


def test_options_reach_every_layer():
    model = _model(implementation="blockwise", block_size=4, num_kv_heads=1, normalize_qk=True)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        attention = layer.self_attention
        assert (attention.implementation, attention.block_size) == ("blockwise", 4)
        assert attention.key.kernel.shape == (8, 1, 4)
        assert attention.query_ln is not None
