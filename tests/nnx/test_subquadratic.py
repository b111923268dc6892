"""Modules of the sub-quadratic families: a layer takes any of them by one argument."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from attention_jax import masks, subquadratic
from attention_jax.nnx import (
    LinearAttention,
    LowRankAttention,
    LSHAttention,
    MemoryCompressedAttention,
    MultiHeadAttention,
    NystromAttention,
    RoutedAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    additive,
    alibi,
    rotary,
)

X = np.random.default_rng(3).normal(size=(2, 7, 16)).astype(np.float32)
PADDING = masks.padding(np.array([7, 4]))
PADDED = np.arange(7) < np.array([7, 6]).reshape(2, 1, 1, 1)
FAVOR = subquadratic.favor_features(jax.random.key(0), 4, 8)
MODULES = {
    "linear": partial(LinearAttention, feature_map=FAVOR),
    "low_rank": partial(LowRankAttention, length=9, rank=3),
    "nystrom": partial(NystromAttention, num_landmarks=3),
    "memory_compressed": MemoryCompressedAttention,
    "lsh": partial(LSHAttention, num_buckets=2),
    "routed": partial(RoutedAttention, block_size=3, num_blocks=2),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_takes_it_by_one_argument(name):
    layer = TransformerEncoderLayer(4, 16, 8, attention=MODULES[name], rngs=nnx.Rngs(0))
    out = nnx.jit(lambda layer, x: layer(x, PADDING))(layer, X)
    assert out.shape == X.shape
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", ["low_rank", "memory_compressed"])
def test_its_own_parameters_train_and_see_no_padding(name):
    layer = MODULES[name](4, 16, rngs=nnx.Rngs(0))
    real = np.arange(7) < np.array([[7], [4]])

    @nnx.jit
    def run(layer, x):
        return nnx.grad(lambda layer: layer(X, x, mask=PADDING).sum())(layer)

    grads, again = run(layer, X), run(layer, np.where(real[..., None], X, np.nan))
    own = {"low_rank": "key_projection", "memory_compressed": "value_kernel"}[name]
    assert np.abs(getattr(grads, own)[...]).max() > 0
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_module_is_its_function_between_the_projections():
    options = {"num_kv_heads": 2, "positions": rotary()}
    layer = LinearAttention(4, 16, rngs=nnx.Rngs(0), **options)
    plain = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options)
    query, key, value = plain._project(X, X, X, None, None)
    want = plain.out(
        subquadratic.linear_attention(query, key, value, mask=masks.causal() & PADDING)
    )
    np.testing.assert_allclose(layer(X, mask=PADDING, is_causal=True), want, rtol=1e-5, atol=1e-6)


def test_parts_with_a_state_make_the_whole():
    layer = LinearAttention(4, 16, num_kv_heads=2, positions=rotary(), rngs=nnx.Rngs(0))

    @nnx.jit
    def run(layer, x):
        first, state = layer.with_state(x[:, :4])
        second, state = layer.with_state(x[:, 4:], state, mask=PADDED[..., 4:])
        return layer(x, mask=PADDED, is_causal=True), first, second

    whole, first, second = run(layer, X)
    np.testing.assert_allclose(first, whole[:, :4], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, whole[:, 4:], rtol=1e-5, atol=1e-6)


def test_random_parts_are_no_parameters_and_can_be_drawn_anew():
    layer = LinearAttention(4, 16, feature_map=FAVOR, rngs=nnx.Rngs(0))
    assert sorted(nnx.state(layer, nnx.Param)) == ["key", "out", "query", "value"]
    before = layer(X)
    layer.feature_map = layer.feature_map.redraw(jax.random.key(5))
    assert not np.allclose(layer(X), before)
    reformer = LSHAttention(4, 16, num_buckets=4, window=1, rngs=nnx.Rngs(0))
    assert sorted(nnx.state(reformer, nnx.Param)) == ["out", "query", "value"]
    before = reformer(X)
    reformer.hash_key[...] = jax.random.key_data(jax.random.key(8))
    assert not np.allclose(reformer(X), before)


def test_a_decoder_layer_takes_one_that_keeps_order():
    layer = TransformerDecoderLayer(4, 16, 8, attention=LinearAttention, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer, x: layer(x, X))
    changed = X.copy()
    changed[:, 5:] = 3
    out = run(layer, X)
    np.testing.assert_allclose(run(layer, changed)[:, :5], out[:, :5], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="causal order"):
        TransformerDecoderLayer(4, 16, 8, attention=NystromAttention, rngs=nnx.Rngs(0))(X, X)


def test_what_has_no_place_is_refused():
    for options in (
        {"score": additive(4)},
        {"implementation": "flash"},
        {"block_size": 4},
        {"dropout_rate": 0.1},
        {"decode": True},
    ):
        with pytest.raises(ValueError, match=f"LinearAttention has no {next(iter(options))}"):
            LinearAttention(4, 16, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match="no scores to add a bias to"):
        LinearAttention(4, 16, positions=alibi(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="fused_qkv"):
        LSHAttention(4, 16, fused_qkv=True, rngs=nnx.Rngs(0))
    layer = LinearAttention(4, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no scores to add a bias to"):
        layer(X, bias=np.zeros((7, 7), np.float32))
    with pytest.raises(NotImplementedError, match="no positions or cache"):
        layer.with_cache(X, layer.new_cache(2, 9))
    with pytest.raises(NotImplementedError, match="statistics"):
        layer.with_stats(X)
    with pytest.raises(NotImplementedError, match="weights"):
        layer.attention_weights(X)
    with pytest.raises(ValueError, match="made for 5"):
        LowRankAttention(4, 16, length=5, rank=2, rngs=nnx.Rngs(0))(X)
    with pytest.raises(ValueError, match="self-attention"):
        LSHAttention(4, 16, rngs=nnx.Rngs(0))(X, X + 1)
