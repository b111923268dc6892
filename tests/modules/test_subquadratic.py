"""Layers of the sub-quadratic families: a Transformer layer takes any of them by one argument."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from attention_jax import linen, masks, nnx, subquadratic

X = np.random.default_rng(3).normal(size=(2, 7, 16)).astype(np.float32)
PADDING = masks.padding(np.array([7, 4]))
PADDED = np.arange(7) < np.array([7, 6]).reshape(2, 1, 1, 1)
KEY = jax.random.key(0)
FAVOR = subquadratic.favor_features(KEY, 4, 8)
FAMILIES = {
    "linear": ("LinearAttention", {"feature_map": FAVOR}, set()),
    "low_rank": (
        "LowRankAttention", {"length": 9, "rank": 3}, {"key_projection", "value_projection"},
    ),
    "nystrom": ("NystromAttention", {"num_landmarks": 3}, set()),
    "memory_compressed": ("MemoryCompressedAttention", {}, {"key_kernel", "value_kernel"}),
    "lsh": ("LSHAttention", {"num_buckets": 2}, set()),
    "routed": ("RoutedAttention", {"block_size": 3, "num_blocks": 2}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_takes_it_by_one_argument(flavour, name):
    kind, options, own = FAMILIES[name]
    attention = partial(getattr(flavour.modules, kind), **options)
    layer = flavour.layer("TransformerEncoderLayer", 4, 16, 8, inputs=(X,), attention=attention)
    out = layer(X, PADDING)
    assert out.shape == X.shape
    assert np.isfinite(out).all()
    expected = {"query", "key", "value", "out"} | own
    if name == "lsh":
        expected -= {"key"}
        assert set(layer.variables) == {"params", "hash"}
    assert set(layer.params["self_attention"]) == expected


@pytest.mark.parametrize("name", ["low_rank", "memory_compressed"])
def test_its_own_parameters_train_and_see_no_padding(flavour, name):
    kind, options, _ = FAMILIES[name]
    own = {"low_rank": "key_projection", "memory_compressed": "value_kernel"}[name]
    layer = flavour.layer(kind, 4, 16, inputs=(X, X), **options)
    real = np.arange(7) < np.array([[7], [4]])

    @jax.jit
    def run(params, x):
        return jax.grad(lambda params: layer.replace(params)(X, x, mask=PADDING).sum())(params)

    grads, again = (run(layer.params, x) for x in (X, np.where(real[..., None], X, np.nan)))
    assert np.abs(grads[own]).max() > 0
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_module_is_its_function_between_the_projections(flavour):
    options = {"num_kv_heads": 2, "positions": "rotary"}
    layer = flavour.layer("LinearAttention", 4, 16, inputs=(X,), **options)
    plain = flavour.module("MultiHeadAttention", 4, 16, **options)

    def by_hand(plain):
        query, key, value = plain._project(X, X, X, None, None)
        mask = masks.causal() & PADDING
        out = subquadratic.linear_attention(query, key, value, mask=mask)
        return plain._project_out(out, 16)

    if flavour == "nnx":
        want = by_hand(linen.to_nnx(layer.variables, plain))
    else:
        want = plain.apply(layer.variables, method=by_hand)
    out = layer(X, mask=PADDING, is_causal=True)
    own, _ = layer(X, mask=PADDING, method="with_state")
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)


def test_parts_with_a_state_make_the_whole(flavour):
    options = {"num_kv_heads": 2, "positions": "rotary"}
    layer = flavour.layer("LinearAttention", 4, 16, inputs=(X,), **options)
    whole = layer(X, mask=PADDED, is_causal=True)
    first, state = layer(X[:, :4], method="with_state")
    second, state = layer(X[:, 4:], state, mask=PADDED[..., 4:], method="with_state")
    np.testing.assert_allclose(first, whole[:, :4], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, whole[:, 4:], rtol=1e-5, atol=1e-6)


def test_random_parts_are_no_parameters_and_can_be_drawn_anew():
    layer = nnx.LinearAttention(4, 16, feature_map=FAVOR, rngs=flax_nnx.Rngs(0))
    assert sorted(flax_nnx.state(layer, flax_nnx.Param)) == ["key", "out", "query", "value"]
    before = layer(X)
    layer.feature_map = layer.feature_map.redraw(jax.random.key(5))
    assert not np.allclose(layer(X), before)
    reformer = nnx.LSHAttention(4, 16, num_buckets=4, window=1, rngs=flax_nnx.Rngs(0))
    assert sorted(flax_nnx.state(reformer, flax_nnx.Param)) == ["out", "query", "value"]
    before = reformer(X)
    reformer.hash_key[...] = jax.random.key_data(jax.random.key(8))
    assert not np.allclose(reformer(X), before)


def test_a_decoder_layer_takes_one_that_keeps_order(flavour):
    def decoder(attention):
        kind = getattr(flavour.modules, attention)
        return flavour.layer("TransformerDecoderLayer", 4, 16, 8, inputs=(X, X), attention=kind)

    layer = decoder("LinearAttention")
    changed = X.copy()
    changed[:, 5:] = 3
    np.testing.assert_allclose(layer(changed, X)[:, :5], layer(X, X)[:, :5], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="causal order"):
        decoder("NystromAttention")(X, X)


@pytest.mark.parametrize(
    "options",
    [
        {"score": nnx.additive(4)},
        {"implementation": "flash"},
        {"block_size": 4},
        {"dropout_rate": 0.1},
        {"decode": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_a_family_cannot_honour_are_refused(flavour, options):
    with pytest.raises(ValueError, match=f"LinearAttention has no {next(iter(options))}"):
        flavour.module("LinearAttention", 4, 16, **options)


def test_what_a_family_cannot_compute_is_refused(flavour):
    with pytest.raises(ValueError, match="no scores to add a bias to"):
        flavour.module("LinearAttention", 4, 16, positions=nnx.alibi())
    with pytest.raises(ValueError, match="LSHAttention has no fused_qkv"):
        flavour.module("LSHAttention", 4, 16, fused_qkv=True)
    layer = flavour.layer("LinearAttention", 4, 16, inputs=(X,))
    with pytest.raises(ValueError, match="no scores to add a bias to"):
        layer(X, bias=np.zeros((7, 7), np.float32))
    with pytest.raises(NotImplementedError, match="no positions or cache"):
        layer(X, layer.module.new_cache(2, 9), method="with_cache")
    with pytest.raises(NotImplementedError, match="statistics"):
        layer(X, method="with_stats")
    with pytest.raises(NotImplementedError, match="weights"):
        layer(X, method="attention_weights")
    with pytest.raises(ValueError, match="made for 5"):
        flavour.layer("LowRankAttention", 4, 16, inputs=(X,), length=5, rank=2)(X)
    with pytest.raises(ValueError, match="self-attention"):
        flavour.layer("LSHAttention", 4, 16, inputs=(X,))(X, X + 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_go_from_one_flavour_to_the_other_and_back(name):
    kind, options, _ = FAMILIES[name]
    here = getattr(linen, kind)(4, **options)
    there = getattr(nnx, kind)(4, 16, rngs=flax_nnx.Rngs(1), **options)
    made = linen.from_nnx(there)
    shapes = jax.eval_shape(lambda: here.init(KEY, X))
    assert jax.tree.map(np.shape, made) == jax.tree.map(np.shape, shapes)
    run = jax.jit(lambda variables: here.apply(variables, X, mask=PADDING))
    np.testing.assert_allclose(run(made), there(X, mask=PADDING), rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.uint32 else x * 1.5, made)
    again = linen.from_nnx(linen.to_nnx(moved, there))
    jax.tree.map(np.testing.assert_array_equal, again, moved)
