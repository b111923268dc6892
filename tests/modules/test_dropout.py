"""Dropout in modules: when it happens, with which key, and of what (cases A16, A17, A18)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from attention_jax import nnx

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
IDS = jnp.array([[1, 2, 3], [3, 2, 1]])
RATES = {"dropout_rate": 0.3, "attention_dropout_rate": 0.3}
LAYERS = {
    "MultiHeadAttention": ((2, 8), {"dropout_rate": 0.3}, (X,)),
    "AdditiveAttention": ((8, 8, 4), {"dropout_rate": 0.3}, (X, X)),
    "TransformerEncoderLayer": ((2, 8, 16), RATES, (X,)),
    "TransformerDecoderLayer": ((2, 8, 16), RATES, (X, X)),
    "Transformer": ((1, 2, 8, 16, 5, 5), RATES, (IDS, IDS)),
}
SLOW = ("TransformerDecoderLayer", "Transformer")
NAMES = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in LAYERS],
)


def made(flavour, name, **options):
    """A layer, and its inputs; its call takes a key of its own or none."""
    args, rates, inputs = LAYERS[name]
    how = {"deterministic": True}
    return flavour.layer(name, *args, inputs=inputs, how=how, **rates, **options), inputs


def called(layer, inputs, key=None, **options):
    """The call, as it is: errors are not those of jit."""
    key = None if key is None else jax.random.key(key)
    return layer.apply(layer.variables, *inputs, key=key, **options)


@NAMES
def test_constructor_flag_and_call_flag(flavour, name):
    layer, inputs = made(flavour, name)
    plain = called(layer, inputs, deterministic=True)
    for constructed in (None, True, False):
        layer, _ = made(flavour, name, deterministic=constructed)
        for given in (None, True, False):
            decides = constructed if given is None else given
            if decides is None:
                with pytest.raises(ValueError, match="deterministic"):
                    called(layer, inputs, key=1, deterministic=given)
                continue
            out = called(layer, inputs, key=1, deterministic=given)
            assert np.array_equal(out, plain) == decides, (constructed, given)


@NAMES
def test_evaluation_needs_no_randomness_and_training_does(flavour, name):
    args, rates, inputs = LAYERS[name]
    layer, _ = made(flavour, name)
    if flavour == "nnx":  # without a stream for dropout
        layer.module = getattr(nnx, name)(*args, **rates, rngs=flax_nnx.Rngs(params=0))
    first, again = (called(layer, inputs, key=key, deterministic=True) for key in (None, 7))
    np.testing.assert_array_equal(first, again)
    with pytest.raises(ValueError, match="dropout"):
        called(layer, inputs, deterministic=False)
    called(layer, inputs, key=3, deterministic=False)


@NAMES
def test_keys_given_in_the_call_decide(flavour, name):
    layer, inputs = made(flavour, name, deterministic=False)
    first, second = (called(layer, inputs, key=key) for key in (1, 2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(called(layer, inputs, key=1), first)


@NAMES
def test_streams_of_nnx(name):
    args, rates, inputs = LAYERS[name]
    layer = getattr(nnx, name)(*args, **rates, rngs=flax_nnx.Rngs(0))
    layer.eval()
    np.testing.assert_array_equal(layer(*inputs), layer(*inputs))
    layer.train()
    assert not np.array_equal(layer(*inputs), layer(*inputs)), "the layer's own stream moves on"
    np.testing.assert_array_equal(
        layer(*inputs, rngs=flax_nnx.Rngs(dropout=9).dropout),
        layer(*inputs, rngs=flax_nnx.Rngs(dropout=9)),
    )
    with pytest.raises(ValueError, match="dropout or default"):
        layer(*inputs, rngs=flax_nnx.Rngs(params=3))
    without = getattr(nnx, name)(*args, **rates, rngs=flax_nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="dropout or default"):
        without(*inputs, deterministic=False)


@NAMES
def test_unknown_flags_are_refused(flavour, name):
    args, _, _ = LAYERS[name]
    layer, inputs = made(flavour, name)
    with pytest.raises(TypeError, match="train"):
        called(layer, inputs, train=False)
    with pytest.raises(TypeError, match="determinstic"):
        flavour.module(name, *args, determinstic=True)


def test_a_traced_flag(flavour):
    layer, inputs = made(flavour, "MultiHeadAttention")
    plain = called(layer, inputs, deterministic=True)
    run = jax.jit(lambda flag: called(layer, inputs, key=1, deterministic=flag))
    np.testing.assert_allclose(run(True), plain, rtol=1e-6, atol=1e-6)
    assert not np.allclose(run(False), plain)
    if flavour == "linen":  # training without a key is NaN
        run = jax.jit(lambda flag: called(layer, inputs, deterministic=flag))
        np.testing.assert_allclose(run(True), plain, rtol=1e-6, atol=1e-6)
        assert np.isnan(run(False)).all()


def test_without_a_rate_no_flag_is_needed(flavour):
    layer = flavour.layer("MultiHeadAttention", 2, 8, inputs=(X,))
    np.testing.assert_array_equal(called(layer, (X,)), called(layer, (X,), deterministic=False))


def test_weights_are_those_before_dropout(flavour):
    options = {"dropout_rate": 0.5, "deterministic": False}
    one = X[:, :1]
    layer = flavour.layer(
        "MultiHeadAttention", 1, 8, inputs=(X, one), how={"deterministic": True}, **options
    )
    weights = called(layer, (X, one), method="attention_weights")
    np.testing.assert_allclose(weights, 1.0, atol=1e-6)
    weights = called(layer, (X,), method="attention_weights")
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    _, stats = called(layer, (X,), key=1, method="with_stats")
    _, plain = called(layer, (X,), deterministic=True, method="with_stats")
    np.testing.assert_array_equal(stats.entropy, plain.entropy)
    # The output does use the dropped ones: a query's one key is there twice or not at all.
    eye = jnp.eye(8)
    parts = {"value": {"kernel": eye[:, None], "bias": jnp.zeros((1, 8))}}
    parts["out"] = {"kernel": eye[None], "bias": jnp.zeros(8)}
    out = called(layer.replace({**layer.params, **parts}), (X, one), key=1)
    factors = np.asarray(out / one)
    assert {round(float(f), 3) for f in factors.ravel()} == {0.0, 2.0}


def _kept(flavour, broadcast, key):
    """Which weights are kept, `[B, N, T, S]`, read through values that are one-hot by key."""
    B, N, T, S = 2, 2, 16, 64
    eye, zeros = jnp.eye(S), jnp.zeros((S, N, S))
    inputs = (jnp.ones((B, T, S)), jnp.broadcast_to(eye, (B, S, S)))
    layer = flavour.layer(
        "MultiHeadAttention", N, S, N * S, N * S, dropout_rate=0.5, broadcast_dropout=broadcast,
        deterministic=False, use_bias=False, inputs=inputs, how={"deterministic": True},
    )  # fmt: skip
    values = jnp.broadcast_to(eye[:, None], (S, N, S))
    out = jnp.eye(N * S).reshape(N, S, N * S)
    kernels = {"query": zeros, "key": zeros, "value": values, "out": out}
    layer = layer.replace({name: {"kernel": kernel} for name, kernel in kernels.items()})
    out = called(layer, inputs, key=key).reshape(B, T, N, S)
    weights = np.asarray(jnp.moveaxis(out, 2, 1)) * S
    assert {round(float(w), 4) for w in np.unique(weights)} == {0.0, 2.0}
    return weights > 0


def test_masks_are_independent_by_default(flavour):
    kept = _kept(flavour, False, 1)
    for axis in range(4):
        first, second = np.take(kept, 0, axis), np.take(kept, 1, axis)
        assert not np.array_equal(first, second), axis
    sigma = 0.5 / np.sqrt(kept.size)
    assert abs(kept.mean() - 0.5) < 4 * sigma
    np.testing.assert_array_equal(kept, _kept(flavour, False, 1))
    assert not np.array_equal(kept, _kept(flavour, False, 2))


def test_broadcast_dropout_shares_one_mask_over_batch_and_heads(flavour):
    kept = _kept(flavour, True, 1)
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:1, :1], kept.shape))
    assert not np.array_equal(kept[0, 0, 0], kept[0, 0, 1])
    assert not np.array_equal(kept[0, 0, :, 0], kept[0, 0, :, 1])


def test_the_implementation_does_not_change_what_is_dropped(flavour):
    outs = []
    for name, size in (("dense", None), ("blockwise", 2), ("blockwise", (3, 4))):
        how = {"implementation": name, "block_size": size, "deterministic": False}
        layer, inputs = made(flavour, "MultiHeadAttention", **how)
        outs.append(called(layer, inputs, key=1))
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=1e-5, atol=1e-6)


def test_residual_dropout_keeps_the_mean():
    layer = nnx.TransformerEncoderLayer(
        1, 8, 16, norm="pre", dropout_rate=0.4, rngs=flax_nnx.Rngs(0)
    )
    ones = jnp.ones((400, 50))
    dropped = layer.dropout(ones, deterministic=False)
    assert abs(float(dropped.mean()) - 1) < 0.03
    assert {round(float(x), 4) for x in np.unique(dropped)} == {0.0, round(1 / 0.6, 4)}
    np.testing.assert_array_equal(layer.dropout(ones, deterministic=True), ones)
    assert jax.tree.leaves(flax_nnx.state(layer.dropout, flax_nnx.RngState))
