"""Fewer heads: the same outputs as with those heads silenced, in both flavours; heads made one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax.diagnostics import capture, head_importance, mask_heads
from attention_jax.nnx import (
    MultiHeadAttention,
    TransformerEncoder,
    merge_similar_heads,
    prune_heads,
)

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 16)).astype(np.float32)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)


def run(model):
    return jax.jit(lambda x: model(x))(X)


def silenced(model, heads):
    return jax.jit(lambda x: mask_heads(model, x, heads=heads))(X)


LAYERS = {
    "plain": ({}, [1]),
    "groups_even": ({"num_kv_heads": 2}, [0, 1]),
    "groups_odd": ({"num_kv_heads": 2, "value_features": 8, "use_bias": False}, [0]),
    "additive": ({"score": "additive", "positions": "alibi"}, [0, 3]),
    "cosine": ({"score": "cosine", "positions": "relative_bias"}, [2]),
    "object": (
        {"score": aj.scores.soft_cap(aj.scores.scaled_dot(np.float32([1, 2, 3, 4])), 5.0)},
        [0],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_pruned_layer_is_the_layer_with_heads_silenced(name):
    options, pruned = LAYERS[name]
    layer = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), **options)
    for part in (layer.query, layer.value, layer.out):
        if part.bias is not None:
            part.bias[...] = RNG.normal(size=part.bias.shape).astype(np.float32)
    wanted = silenced(layer, {"MultiHeadAttention": pruned})
    small = prune_heads(layer, pruned)
    assert small.num_heads == 4 - len(pruned)
    assert small.query.kernel.shape == (16, 4 - len(pruned), 4)
    close(run(small), wanted)
    assert layer.num_heads == 4
    if name in ("groups_odd", "additive", "object"):
        variables = linen.from_nnx(layer)
        module = linen.MultiHeadAttention(num_heads=4, **options)
        narrow, its = linen.prune_heads(module, variables, pruned)
        close(jax.jit(narrow.apply)(its, X), wanted)


@pytest.mark.parametrize(
    "mask",
    [
        aj.masks.from_array(RNG.random((1, 4, 5, 5)) < 0.7),
        aj.masks.random(jax.random.key(0), 5, 1, 2, 4),
        ~aj.masks.random(jax.random.key(0), 5, 1, 2, 4),
    ],
    ids=repr,
)
def test_a_mask_with_a_head_axis_loses_the_heads_too(mask):
    layer = MultiHeadAttention(4, 16, mask=mask & aj.masks.causal(), rngs=nnx.Rngs(0))
    wanted = silenced(layer, {"MultiHeadAttention": [1, 3]})
    small = prune_heads(layer, [1, 3])
    close(run(small), wanted)
    wanted = silenced(layer, {"MultiHeadAttention": [0, 1, 3]})
    close(run(prune_heads(small, [0])), wanted)


def test_heads_of_a_whole_model_go_by_path_and_importance():
    model = TransformerEncoder(2, 4, 16, 4, rngs=nnx.Rngs(0))
    first, second = (f"layers/{i}/self_attention" for i in range(2))
    model.layers[1].self_attention.out.kernel[3] = 0.0
    options = {"loss": lambda y: jnp.mean(jnp.square(y[..., :3]))}
    by_gradient = head_importance(model, X, **options, normalize=True)
    by_ablation = head_importance(model, X, kind="ablation", **options)
    for found in (by_gradient, by_ablation):
        assert list(found) == [first, second]
        assert np.abs(found[second]).argmin() == 3
        assert found[second][3] == 0
    np.testing.assert_allclose(np.linalg.norm(by_gradient[first]), 1, rtol=1e-5)
    heads, loss = {first: [2], second: [3]}, options["loss"]
    small, silent = run(prune_heads(model, heads)), silenced(model, heads)
    close(small, silent)
    # the last head of the second puts out nothing as it is
    np.testing.assert_allclose(by_ablation[first][2], loss(silent) - loss(run(model)), atol=1e-6)


def test_gradient_importance_is_that_of_a_gate():
    layer = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
    found = head_importance(layer, X, loss=lambda y: jnp.mean(jnp.square(y)))["MultiHeadAttention"]

    def lost(gates):
        arrays, _ = layer._inputs(X, None, None, None, None)
        out = aj.attend(*arrays) * gates[:, None, :, None]
        return jnp.mean(jnp.square(layer.out(out)))

    slopes = jax.grad(lost)(jnp.ones((2, 4)))
    np.testing.assert_allclose(found, np.abs(slopes).sum(0), rtol=1e-4)


def test_heads_with_one_map_become_one():
    layer = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
    for part in (layer.query, layer.key):
        part.kernel[...] = part.kernel[...].at[:, 2].set(part.kernel[:, 0])
    # values of rank 2 each: the sum has the rank of one head
    for n in (0, 2):
        layer.value.kernel[...] = layer.value.kernel[...].at[:, n, 2:].set(0.0)
    layer.value.bias[0, 1], layer.value.bias[2, 0] = 1.0, -2.0
    found = capture(layer, X, similarity=True)
    small = merge_similar_heads(layer, found)
    assert small.num_heads == 3
    close(run(small), found.output)
    variables, similar = linen.from_nnx(layer), found["MultiHeadAttention"].similarity
    module = linen.MultiHeadAttention(num_heads=4)
    narrow, its = linen.merge_similar_heads(module, variables, similar)
    assert narrow.num_heads == 3
    close(jax.jit(narrow.apply)(its, X), found.output)
    assert merge_similar_heads(layer, np.eye(4)).num_heads == 4


def test_scanned_layers_have_heads_of_their_own():
    plain, scan = (
        TransformerEncoder(2, 4, 16, 4, positions="alibi", scan_layers=flag, rngs=nnx.Rngs(0))
        for flag in (False, True)
    )
    names = {f"layers/self_attention[{i}]": f"layers/{i}/self_attention" for i in range(2)}
    for kind in ("gradient", "ablation"):
        options = {"loss": lambda y: jnp.mean(jnp.square(y[..., :3])), "kind": kind}
        found, wanted = (head_importance(model, X, **options) for model in (scan, plain))
        assert list(found) == list(names)
        for name, path in names.items():
            np.testing.assert_allclose(found[name], wanted[path], rtol=1e-3, atol=1e-6)
    heads = dict(zip(names, ([2, 0], [1, 3]), strict=True))
    wanted = silenced(plain, {names[name]: gone for name, gone in heads.items()})
    close(silenced(scan, heads), wanted)
    small = prune_heads(scan, heads)
    assert small.layers.self_attention.query.kernel.shape == (2, 16, 2, 4)
    close(run(small), wanted)
    with pytest.raises(ValueError, match="must keep as many heads, but would keep 3, 4"):
        prune_heads(scan, {"layers/self_attention[0]": [2]})
    with pytest.raises(ValueError, match=r"layers 0 to 1, and no \[2\]"):
        prune_heads(scan, {"layers/self_attention[2]": [2]})
    with pytest.raises(ValueError, match="has no scanned layers"):
        prune_heads(plain, {"layers/0/self_attention[0]": [2]})


def test_heads_of_a_whole_linen_model_go_by_path():
    model = linen.Transformer(1, 4, 16, 8, 11, 11, num_kv_heads=2, mask=aj.masks.window(3, 3))
    tokens = RNG.integers(1, 11, (2, 5))
    variables = jax.jit(model.init)(jax.random.key(0), tokens, tokens)
    heads = {"encoder/layers_0/self_attention": [1], "decoder/layers_0/cross_attention": [0, 1]}
    inputs = {"variables": variables, "heads": heads}
    wanted = jax.jit(lambda x: mask_heads(model, x, x, **inputs))(tokens)
    small, fewer = linen.prune_heads(model, variables, heads)
    decoder = fewer["params"]["decoder"]["layers_0"]
    assert decoder["cross_attention"]["key"]["kernel"].shape == (16, 1, 4)
    close(jax.jit(small.apply)(fewer, tokens, tokens), wanted)
    assert isinstance(small, linen.Transformer)
    assert small == linen.prune_heads(model, variables, heads)[0]
    # and again, what is small already
    path = "decoder/layers_0/cross_attention"
    smaller, fewest = linen.prune_heads(
        small, fewer, {path: [0], "decoder/layers_0/self_attention": [3]}
    )
    shapes = jax.eval_shape(smaller.init, jax.random.key(0), tokens, tokens)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, fewest)
    found = capture(smaller, tokens, tokens, variables=fewest)
    assert {name: x.num_heads for name, x in found.items()} == {
        "encoder/layers_0/self_attention": 3, "decoder/layers_0/self_attention": 3, path: 1
    }  # fmt: skip
    same, kept = linen.merge_similar_heads(model, variables, {path: np.eye(4)})
    assert same is model
    assert jax.tree.map(jnp.shape, kept) == jax.tree.map(jnp.shape, variables)
    close(small.bind(fewer)(tokens, tokens), wanted)
    with pytest.raises(ValueError, match="'decoder/layers_1' leads to no MultiHeadAttention"):
        linen.prune_heads(model, variables, {"decoder/layers_1": [0]})


class Classifier(flax_linen.Module):
    """A module of a class that is not ours, with attentions in it."""

    def setup(self):
        self.encoder = linen.TransformerEncoder(2, 4, 16, 4, positions="alibi")
        self.head = flax_linen.Dense(3)

    def __call__(self, x):
        return self.head(self.encoder(x))


def test_heads_of_a_module_of_another_class():
    model = Classifier()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    heads = {"encoder/layers_1/self_attention": [0, 2]}
    wanted = jax.jit(lambda x: mask_heads(model, x, variables=variables, heads=heads))(X)
    small, fewer = linen.prune_heads(model, variables, heads)
    close(jax.jit(small.apply)(fewer, X), wanted)
    shapes = jax.eval_shape(small.init, jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, fewer)
    again = {"encoder/layers_1/self_attention": [1], "encoder/layers_0/self_attention": [3]}
    smaller, fewest = linen.prune_heads(small, fewer, again)
    wanted = jax.jit(lambda x: mask_heads(small, x, variables=fewer, heads=again))(X)
    close(jax.jit(smaller.apply)(fewest, X), wanted)
    with pytest.raises(NotImplementedError, match="call apply"):
        small.bind(fewer)


def test_scanned_layers_of_linen_too():
    plain, scan = (
        linen.TransformerEncoder(2, 4, 16, 4, score="additive", scan_layers=flag)
        for flag in (False, True)
    )
    params = jax.jit(plain.init)(jax.random.key(0), X)["params"]
    both = [params.pop(f"layers_{i}") for i in range(2)]
    stacked = {"params": {**params, "layers": jax.tree.map(lambda *x: jnp.stack(x), *both)}}
    params |= {f"layers_{i}": x for i, x in enumerate(both)}
    heads = {"layers/self_attention[0]": [2], "layers/self_attention[1]": [0]}
    listed = {f"layers_{i}/self_attention": gone for i, gone in enumerate(heads.values())}
    inputs = {"heads": listed, "variables": {"params": params}}
    wanted = jax.jit(lambda x: mask_heads(plain, x, **inputs))(X)
    close(jax.jit(lambda x: mask_heads(scan, x, heads=heads, variables=stacked))(X), wanted)
    small, fewer = linen.prune_heads(scan, stacked, heads)
    assert fewer["params"]["layers"]["self_attention"]["out"]["kernel"].shape == (2, 3, 4, 16)
    close(jax.jit(small.apply)(fewer, X), wanted)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_scanned_layers_of_linen_decode_over_caches_of_their_heads(scan_layers):
    model = linen.TransformerLM(2, 4, 16, 8, 11, num_kv_heads=2, scan_layers=scan_layers)
    tokens = RNG.integers(1, 11, (2, 5))
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    gone = {"decoder/layers/self_attention": [0, 1]}
    if not scan_layers:
        gone = {"decoder/layers_1/self_attention": [0]}  # of a group one: each has its own now
    small, fewer = linen.prune_heads(model, variables, gone)
    cache = small.new_cache(2, 6)
    step = jax.jit(functools.partial(small.apply, method="with_cache"))
    close(step(fewer, tokens, cache)[0], jax.jit(small.apply)(fewer, tokens))


def test_mistakes_name_what_is_wrong():
    layer = MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="heads 0 to 3, and no 4"):
        prune_heads(layer, [4])
    with pytest.raises(ValueError, match="all 4 would go"):
        prune_heads(layer, range(4))
    with pytest.raises(ValueError, match="'layers/0' leads to no MultiHeadAttention"):
        prune_heads(TransformerEncoder(1, 2, 8, 8, rngs=nnx.Rngs(0)), {"layers/0": [0]})
    with pytest.raises(ValueError, match=r"similarity has shape \[3, 3\]"):
        merge_similar_heads(layer, np.eye(3))
    with pytest.raises(ValueError, match="the capture has none"):
        merge_similar_heads(layer, {"MultiHeadAttention": None})
    with pytest.raises(ValueError, match="threshold"):
        merge_similar_heads(layer, np.eye(4), threshold=0.0)
    with pytest.raises(ValueError, match="no attention 'x'"):
        mask_heads(layer, X, heads={"x": [0]})
    module = linen.MultiHeadAttention(num_heads=2, score=lambda *_: aj.scores.dot())
    with pytest.raises(NotImplementedError, match="score made by a function"):
        linen.prune_heads(module, {"params": {}}, [0])


@pytest.mark.parametrize("heads", [0, None, "0", [True], [0.0], [[0]], {"": 1}], ids=str)
def test_heads_that_are_no_numbers_are_refused(heads):
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"heads must be a sequence|parameter .(heads|pruned)"):
        prune_heads(layer, heads)
