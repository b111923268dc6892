"""Dropout in modules: when it happens, with which key, and of what (cases A16, A17, A18)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.nnx import (
    AdditiveAttention,
    MultiHeadAttention,
    Transformer,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
IDS = jnp.array([[1, 2, 3], [3, 2, 1]])
RATES = {"dropout_rate": 0.3, "attention_dropout_rate": 0.3}

LAYERS = {
    "attention": (lambda **o: MultiHeadAttention(2, 8, dropout_rate=0.3, **o), (X,)),
    "additive": (lambda **o: AdditiveAttention(8, 8, 4, dropout_rate=0.3, **o), (X, X)),
    "encoder": (lambda **o: TransformerEncoderLayer(2, 8, 16, **RATES, **o), (X,)),
    "decoder": (lambda **o: TransformerDecoderLayer(2, 8, 16, **RATES, **o), (X, X)),
    "model": (lambda **o: Transformer(1, 2, 8, 16, 5, 5, **RATES, **o), (IDS, IDS)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_constructor_flag_and_call_flag(name):
    make, inputs = LAYERS[name]
    plain = make(rngs=nnx.Rngs(0))(*inputs, deterministic=True)
    for constructed in (None, True, False):
        for called in (None, True, False):
            layer = make(deterministic=constructed, rngs=nnx.Rngs(0))
            decides = constructed if called is None else called
            if decides is None:
                with pytest.raises(ValueError, match="deterministic"):
                    layer(*inputs, deterministic=called)
                continue
            out = layer(*inputs, deterministic=called)
            assert np.array_equal(out, plain) == decides, (constructed, called)


@pytest.mark.parametrize("name", LAYERS)
def test_evaluation_needs_no_randomness_and_training_does(name):
    make, inputs = LAYERS[name]
    layer = make(rngs=nnx.Rngs(params=0))  # no stream for dropout
    first = layer(*inputs, deterministic=True)
    again = layer(*inputs, deterministic=True, rngs=nnx.Rngs(7))
    np.testing.assert_array_equal(first, again)
    with pytest.raises(ValueError, match="dropout or default"):
        layer(*inputs, deterministic=False)
    with pytest.raises(ValueError, match="dropout or default"):
        layer(*inputs, deterministic=False, rngs=nnx.Rngs(params=3))
    layer(*inputs, deterministic=False, rngs=nnx.Rngs(dropout=3))


@pytest.mark.parametrize("name", LAYERS)
def test_keys_given_in_the_call_decide(name):
    make, inputs = LAYERS[name]
    layer = make(deterministic=False, rngs=nnx.Rngs(0))
    first, second = (layer(*inputs, rngs=nnx.Rngs(key)) for key in (1, 2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(layer(*inputs, rngs=nnx.Rngs(1)), first)
    assert not np.array_equal(layer(*inputs), layer(*inputs)), "the layer's own stream moves on"
    assert np.array_equal(
        layer(*inputs, rngs=nnx.Rngs(dropout=9).dropout), layer(*inputs, rngs=nnx.Rngs(dropout=9))
    )


@pytest.mark.parametrize("name", LAYERS)
def test_train_and_eval_set_the_flag(name):
    make, inputs = LAYERS[name]
    layer = make(rngs=nnx.Rngs(0))
    layer.eval()
    np.testing.assert_array_equal(layer(*inputs), layer(*inputs))
    layer.train()
    assert not np.array_equal(layer(*inputs), layer(*inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_unknown_flags_are_refused(name):
    make, inputs = LAYERS[name]
    layer = make(rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="train"):
        layer(*inputs, train=False)
    with pytest.raises(TypeError, match="determinstic"):
        make(determinstic=True, rngs=nnx.Rngs(0))


def test_without_a_rate_no_flag_is_needed():
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(params=0))
    np.testing.assert_array_equal(layer(X), layer(X, deterministic=False))


def test_weights_are_those_before_dropout():
    layer = MultiHeadAttention(1, 8, dropout_rate=0.2, deterministic=False, rngs=nnx.Rngs(0))
    one = X[:, :1]
    np.testing.assert_allclose(layer.attention_weights(X, one), 1.0, atol=1e-6)
    np.testing.assert_allclose(layer.attention_weights(X).sum(-1), 1.0, atol=1e-6)
    _, stats = layer.with_stats(X)
    _, plain = layer.with_stats(X, deterministic=True)
    np.testing.assert_array_equal(stats.entropy, plain.entropy)
    # The output does use the dropped ones: a query's one key is there 1 / 0.8 times or not at all.
    layer.out.kernel[...] = jnp.eye(8).reshape(1, 8, 8)
    factors = np.asarray(layer(X, one) / layer.value(one)[..., 0, :])
    assert {round(float(f), 3) for f in factors.ravel()} == {0.0, 1.25}


def _kept(broadcast, rngs):
    """Which weights are kept, `[B, N, T, S]`, read through values that are one-hot by key."""
    B, N, T, S = 2, 2, 16, 64
    layer = MultiHeadAttention(
        N,
        N * S,
        dropout_rate=0.5,
        broadcast_dropout=broadcast,
        deterministic=False,
        score="dot",
        use_bias=False,
        rngs=nnx.Rngs(0),
    )
    layer.query.kernel[...] = jnp.zeros_like(layer.query.kernel[...])
    eye = jnp.eye(S)
    layer.value.kernel[...] = jnp.concatenate([eye, jnp.zeros((S, S))])[:, None] * jnp.ones(
        (1, N, 1)
    )
    layer.out.kernel[...] = jnp.eye(N * S).reshape(N, S, N * S)
    states = jnp.broadcast_to(jnp.pad(eye, ((0, 0), (0, S))), (B, S, N * S))
    out = layer(jnp.ones((B, T, N * S)), states, rngs=rngs).reshape(B, T, N, S)
    weights = np.asarray(jnp.moveaxis(out, 2, 1)) * S
    assert {round(float(w), 4) for w in np.unique(weights)} == {0.0, 2.0}
    return weights > 0


def test_masks_are_independent_by_default():
    kept = _kept(False, nnx.Rngs(1))
    for axis in range(4):
        first, second = np.take(kept, 0, axis), np.take(kept, 1, axis)
        assert not np.array_equal(first, second), axis
    sigma = 0.5 / np.sqrt(kept.size)
    assert abs(kept.mean() - 0.5) < 4 * sigma
    np.testing.assert_array_equal(kept, _kept(False, nnx.Rngs(1)))
    assert not np.array_equal(kept, _kept(False, nnx.Rngs(2)))


def test_broadcast_dropout_shares_one_mask_over_batch_and_heads():
    kept = _kept(True, nnx.Rngs(1))
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:1, :1], kept.shape))
    assert not np.array_equal(kept[0, 0, 0], kept[0, 0, 1])
    assert not np.array_equal(kept[0, 0, :, 0], kept[0, 0, :, 1])


def test_the_implementation_does_not_change_what_is_dropped():
    outs = [
        MultiHeadAttention(
            2,
            8,
            dropout_rate=0.5,
            deterministic=False,
            implementation=name,
            block_size=size,
            rngs=nnx.Rngs(0),
        )(X)
        for name, size in (("dense", None), ("blockwise", 2), ("blockwise", (3, 4)))
    ]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-5, atol=1e-6)


def test_residual_dropout_keeps_the_mean():
    layer = TransformerEncoderLayer(1, 8, 16, norm="pre", dropout_rate=0.4, rngs=nnx.Rngs(0))
    ones = jnp.ones((400, 50))
    dropped = layer.dropout(ones, deterministic=False)
    assert abs(float(dropped.mean()) - 1) < 0.03
    assert {round(float(x), 4) for x in np.unique(dropped)} == {0.0, round(1 / 0.6, 4)}
    np.testing.assert_array_equal(layer.dropout(ones, deterministic=True), ones)
    assert jax.tree.leaves(nnx.state(layer.dropout, nnx.RngState))
