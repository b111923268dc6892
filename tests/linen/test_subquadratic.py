"""Linen modules of the sub-quadratic families: a layer takes any of them by one argument."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from attention_jax import masks, subquadratic
from attention_jax import nnx as nnx_flavour
from attention_jax.linen import (
    LinearAttention,
    LowRankAttention,
    LSHAttention,
    MemoryCompressedAttention,
    MultiHeadAttention,
    NystromAttention,
    RoutedAttention,
    TransformerEncoderLayer,
    additive,
    alibi,
    from_nnx,
    to_nnx,
)

X = np.random.default_rng(3).normal(size=(2, 7, 16)).astype(np.float32)
PADDING = masks.padding(np.array([7, 4]))
KEY = jax.random.key(0)
MODULES = {
    "linear": (LinearAttention, set()),
    "low_rank": (
        partial(LowRankAttention, length=9, rank=3),
        {"key_projection", "value_projection"},
    ),
    "nystrom": (partial(NystromAttention, num_landmarks=3), set()),
    "memory_compressed": (MemoryCompressedAttention, {"key_kernel", "value_kernel"}),
    "lsh": (partial(LSHAttention, num_buckets=2), set()),
    "routed": (partial(RoutedAttention, block_size=3, num_blocks=2), set()),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_takes_it_by_one_argument(name):
    module, own = MODULES[name]
    layer = TransformerEncoderLayer(4, 16, 8, attention=module)
    out, variables = jax.jit(lambda x: layer.init_with_output(KEY, x, PADDING))(X)
    assert out.shape == X.shape
    assert np.isfinite(out).all()
    names = {"query", "key", "value", "out"} | own
    if name == "lsh":
        names -= {"key"}
        assert set(variables) == {"params", "hash"}
    assert set(variables["params"]["self_attention"]) == names


def test_a_module_is_its_function_between_the_projections():
    layer, plain = LinearAttention(4, num_kv_heads=2), MultiHeadAttention(4, num_kv_heads=2)

    @jax.jit
    def both(x):
        variables = plain.init(KEY, x)
        mask = masks.causal() & PADDING

        def by_hand(plain):
            query, key, value = plain._project(x, x, x, None, None)
            out = subquadratic.linear_attention(query, key, value, mask=mask)
            return plain._project_out(out, 16)

        out = layer.apply(variables, x, mask=PADDING, is_causal=True)
        own, _ = layer.apply(variables, x, mask=PADDING, method=layer.with_state)
        return out, own, plain.apply(variables, method=by_hand)

    out, own, want = both(X)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)


def test_what_has_no_place_is_refused():
    for options in ({"score": additive(4)}, {"dropout_rate": 0.1}, {"decode": True}):
        with pytest.raises(ValueError, match=f"LinearAttention has no {next(iter(options))}"):
            LinearAttention(4, **options)
    with pytest.raises(ValueError, match="LSHAttention has no fused_qkv"):
        LSHAttention(4, fused_qkv=True)
    for options, call in (
        ({"positions": alibi()}, {}),
        ({}, {"bias": np.zeros((7, 7), np.float32)}),
    ):
        with pytest.raises(ValueError, match="no scores to add a bias to"):
            jax.eval_shape(lambda o=options, c=call: LinearAttention(4, **o).init(KEY, X, **c))
    with pytest.raises(ValueError, match="made for 5"):
        jax.eval_shape(lambda: LowRankAttention(4, length=5, rank=2).init(KEY, X))
    with pytest.raises(ValueError, match="self-attention"):
        jax.eval_shape(lambda: LSHAttention(4).init(KEY, X, X + 1))


def test_parameters_go_from_one_flavour_to_the_other_and_back():
    for name, (module, _) in MODULES.items():
        options = module.keywords if isinstance(module, partial) else {}
        kind = module.func if isinstance(module, partial) else module
        here = kind(4, **options)
        there = getattr(nnx_flavour, kind.__name__)(4, 16, rngs=nnx.Rngs(1), **options)
        made = from_nnx(there)
        shapes = jax.eval_shape(lambda h=here: h.init(KEY, X))
        assert jax.tree.map(np.shape, made) == jax.tree.map(np.shape, shapes)
        if name not in ("lsh", "memory_compressed"):  # the others have parameters of MHA alone
            continue
        run = jax.jit(lambda variables, h=here: h.apply(variables, X, mask=PADDING))
        np.testing.assert_allclose(run(made), there(X, mask=PADDING), rtol=1e-5, atol=1e-6)
        moved = jax.tree.map(lambda x: x + 1 if x.dtype == np.uint32 else x * 1.5, made)
        again = from_nnx(to_nnx(moved, there))
        jax.tree.map(np.testing.assert_array_equal, again, moved)
