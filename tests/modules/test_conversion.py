"""NNX and Linen: the parameters of one in the other give equal numbers, either way."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax import nnx as modules
from tests.modules.linen_calls import apply

pytestmark = pytest.mark.thorough

B, T, S, D = 2, 5, 7, 8
RNG = np.random.default_rng(0)
X, STATES = (jnp.asarray(RNG.normal(size=(B, n, D)), jnp.float32) for n in (T, S))
PADDING = aj.masks.padding(jnp.array([S, 3]))
KEY = jax.random.key(0)
SOURCE = jnp.array([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 5, 4, 3, 2], [1, 6, 7, 8, 2]])


def attention(**options):
    return lambda module, **more: module.MultiHeadAttention(2, D, **options, **more)


def layers(**options):
    return lambda module, **more: module.TransformerDecoderLayer(2, D, 16, **options, **more)


MAKE = {
    "score and table": attention(score="cosine", positions="relative_bias"),
    "grouped": attention(
        num_kv_heads=1,
        normalize_qk=True,
        use_bias=False,
        value_features=6,
        fused_qkv=True,
        out_features=3,
    ),
    "score object": attention(
        score=aj.scores.temperature(aj.scores.dot(), jnp.array([1.5, 3.0])), mask=PADDING
    ),
    "scale": attention(score=modules.learned_scale("general", per="layer")),
    "additive": lambda module, **more: module.AdditiveAttention(D, D, 3, **more),
    "mean": layers(norm="pre", cross_attention="mean", positions="rotary"),
}


def pair(make):
    """A module of each flavour."""
    return nnx.jit(lambda: make(modules, rngs=nnx.Rngs(0)))(), make(linen)


def methods(layer):
    """The methods to compare."""
    weights = "with_weights" if "Transformer" in type(layer).__name__ else "attention_weights"
    return ("__call__", "with_stats", weights)


@nnx.jit
def of_nnx(layer):
    return {name: getattr(layer, name)(X, STATES) for name in methods(layer)}


def of_linen(layer, variables):
    return {
        name: layer.apply(variables, X, STATES, method=getattr(layer, name))
        for name in methods(layer)
    }


@pytest.mark.parametrize("name", MAKE)
def test_the_parameters_of_either_serve_the_other(name):
    ours, theirs = pair(MAKE[name])
    variables = linen.from_nnx(ours)
    chex.assert_trees_all_equal_shapes(
        variables, jax.eval_shape(theirs.init, jax.random.key(0), X, STATES)
    )
    before, run = of_nnx(ours), jax.jit(lambda v: of_linen(theirs, v))
    chex.assert_trees_all_close(run(variables), before, rtol=1e-5, atol=1e-5)

    moved = jax.tree.map(lambda p: p * 0.5 + 0.1, variables)
    after = linen.to_nnx(moved, ours)
    found = of_nnx(after)
    chex.assert_trees_all_close(run(moved), found, rtol=1e-5, atol=1e-5)
    assert not np.allclose(found["__call__"], before["__call__"], atol=1e-3)
    chex.assert_trees_all_equal(linen.from_nnx(ours), variables)  # it stays as it was
    chex.assert_trees_all_equal(linen.from_nnx(after), moved)


@pytest.mark.parametrize(
    "options",
    [
        {"share_embedding": True, "positions": "learned", "max_length": 9},
        {"norm": "pre", "tie_output": False, "positions": "rotary", "value_features": 6},
    ],
    ids=str,
)
def test_whole_models(options):
    sizes = (1 if "norm" in options else 2, 2, D, 16, 11, 11)
    ours, theirs = pair(lambda module, **more: module.Transformer(*sizes, **options, **more))
    variables = linen.from_nnx(ours)
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), SOURCE, TARGET)
    chex.assert_trees_all_equal_shapes(variables, shapes)
    pictured = ("cross_attention_weights",) if "norm" in options else ()

    def look(model, call):
        names = ("__call__", *pictured)
        return [call(getattr(model, name), SOURCE, TARGET, SOURCE > 0) for name in names]

    mine = nnx.jit(lambda model: look(model, lambda f, *a: f(*a)))
    run = jax.jit(lambda v: look(theirs, lambda f, *a: theirs.apply(v, *a, method=f)))
    moved = jax.tree.map(lambda p: p * 0.5 + 0.1, variables)
    for params, model in ((variables, ours), (moved, linen.to_nnx(moved, ours))):
        chex.assert_trees_all_close(run(params), mine(model), rtol=1e-5, atol=1e-5)


def test_parameters_that_do_not_agree_are_told():
    layer = modules.MultiHeadAttention(2, D, rngs=nnx.Rngs(0))
    variables = linen.from_nnx(layer)
    with pytest.raises(ValueError, match=r"one side only.*score/v"):
        linen.to_nnx(
            variables, modules.MultiHeadAttention(2, D, score="additive", rngs=nnx.Rngs(0))
        )
    variables["params"]["out"]["bias"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"out/bias.*\[3\].*\[8\]"):
        linen.to_nnx(variables, layer)


def test_dropout_at_one_key_is_one_dropout():
    ours, theirs = pair(attention(dropout_rate=0.5, deterministic=False))
    variables = linen.from_nnx(ours)
    stream = nnx.Rngs(dropout=7).dropout
    key = nnx.clone(stream)()
    found = apply(theirs, variables, X, dropout_rng=key)
    np.testing.assert_allclose(found, ours(X, rngs=stream), rtol=1e-5, atol=1e-5)


LATER = aj.masks.from_array(np.arange(T) > 0)


@pytest.mark.parametrize(
    "options", [{"score": "gated", "num_queries": 2, "mask": LATER}, {"score": "dot"}]
)
def test_pooling(options):
    ours, theirs = pair(lambda module, **more: module.AttentionPooling(D, 3, **options, **more))
    variables, there = linen.from_nnx(ours), jnp.array([[True] * T, [False] * T])
    chex.assert_trees_all_equal_shapes(variables, jax.eval_shape(theirs.init, KEY, X))
    for method in ("__call__", "attention_weights"):
        found = apply(theirs, variables, X, there, method=method)
        expected = nnx.jit(lambda layer, m=method: getattr(layer, m)(X, there))(ours)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[1], 0)
        if method == "attention_weights":
            assert bool(found[0, 0, 0] == 0) == ("mask" in options)


@pytest.mark.parametrize("options", [{"num_heads": 2}, {"join": "mean", "self_loops": False}])
def test_graphs(options):
    ours, theirs = pair(lambda module, **more: module.GraphAttention(D, 3, **options, **more))
    variables = linen.from_nnx(ours)
    chex.assert_trees_all_equal_shapes(variables, jax.eval_shape(theirs.init, KEY, X))
    ring = jnp.roll(jnp.eye(T, dtype=bool), 1, axis=1).at[2].set(False)
    for method in ("__call__", "attention_weights"):
        found = apply(theirs, variables, X, ring, method=method)
        expected = nnx.jit(lambda layer, m=method: getattr(layer, m)(X, ring))(ours)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_scale_that_follows_the_entropy():
    ours, theirs = pair(attention(score=modules.entropy_scale(0.5)))
    variables = linen.from_nnx(ours)
    assert set(variables) == {"params", "adapted"}
    (before,) = jax.tree.leaves(variables["adapted"])
    _, changed = apply(theirs, variables, X, deterministic=False, mutable=["adapted"])
    (after,) = jax.tree.leaves(changed)
    assert np.all(after > before)  # random scores are too even: they sharpen
    apply(theirs, variables, X, deterministic=True)  # nothing to write to, nothing to write
    nnx.jit(lambda layer: layer(X, deterministic=False))(ours)
    chex.assert_trees_all_close(changed["adapted"], linen.from_nnx(ours)["adapted"], rtol=1e-5)
    moved = linen.to_nnx({**variables, **changed}, ours)
    chex.assert_trees_all_equal(linen.from_nnx(moved), {**variables, **changed})
