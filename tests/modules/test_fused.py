"""One product for queries, keys and values, only where the three are as they were made."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax import nnx as modules
from tests.modules.flavours import Made

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)


class Adapted(nnx.Module):
    """A projection with a learned low-rank change."""

    def __init__(self, base):
        self.base = base
        self.down = nnx.Param(jnp.ones((8, 1)))
        self.up = nnx.Param(jnp.ones((1, *base.out_features)))

    def __call__(self, x):
        return self.base(x) + jnp.einsum("...d,dr,rnh->...nh", x, self.down[...], self.up[...])


class Doubled(nnx.LinearGeneral):
    """A derived layer with the same parameters."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


def _wrap(layer, name):
    setattr(layer, name, Adapted(getattr(layer, name)))


def _derive(layer, name):
    new = Doubled(8, (2, 4), rngs=nnx.Rngs(0))
    new.kernel, new.bias = getattr(layer, name).kernel, getattr(layer, name).bias
    setattr(layer, name, new)


def _lora(layer, name):
    """Flax's own, around a projection that gives heads."""
    base = getattr(layer, name)

    def flat(x):
        return base(x).reshape(*x.shape[:-1], 8)

    adapter = nnx.LoRA(8, 2, 8, base_module=flat, rngs=nnx.Rngs(1))
    adapter.lora_b[...] = jnp.ones_like(adapter.lora_b[...])

    class Heads(nnx.Module):
        def __init__(self):
            self.base, self.adapter = base, adapter

        def __call__(self, x):
            return self.adapter(x).reshape(*x.shape[:-1], 2, 4)

    setattr(layer, name, Heads())


def _product(layer, name):
    def product(*args, **options):
        return 3 * jax.lax.dot_general(*args, **options)

    getattr(layer, name).dot_general = product


def _quantised(layer, name):
    part = getattr(layer, name)
    scale = jnp.max(jnp.abs(part.kernel[...])) / 127
    part.kernel = nnx.Param(jnp.round(part.kernel[...] / scale).astype(jnp.int8))

    def product(x, kernel, *args, **options):
        return jax.lax.dot_general(x, kernel.astype(x.dtype) * scale, *args, **options)

    part.dot_general = product


def _promoted(layer, name):
    def promote(arrays, *, dtype=None):
        return nnx.nn.dtypes.promote_dtype(tuple(2 * a for a in arrays), dtype=dtype)

    getattr(layer, name).promote_dtype = promote


def _without_bias(layer, name):
    getattr(layer, name).bias = nnx.data(None)


def _low(layer, name):
    getattr(layer, name).dtype = jnp.bfloat16


CHANGES = [
    _wrap,
    _derive,
    _lora,
    _product,
    _quantised,
    _promoted,
    _without_bias,
    _low,
]


def _pair():
    """A fused layer and its twin that is not, of the same parameters."""
    return [
        modules.MultiHeadAttention(
            2, 8, num_kv_heads=2, mask=aj.masks.causal(), fused_qkv=fused,
            bias_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0),
        )
        for fused in (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_projection_that_was_replaced_is_called(change, name):
    fused, plain = _pair()
    before = nnx.jit(lambda layer: layer(X))(plain)
    change(fused, name)
    change(plain, name)
    with jax.numpy_dtype_promotion("standard"):
        found, expected = (nnx.jit(lambda layer: layer(X))(layer) for layer in (fused, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if (change, name) != (_without_bias, "key"):  # it moves all scores of a query alike
        assert not np.allclose(expected, before, rtol=1e-6, atol=1e-7), "the change shows nothing"


def test_an_adapter_has_its_gradient():
    fused, plain = _pair()
    for layer in (fused, plain):
        _wrap(layer, "value")

    def gradient(layer):
        return nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)

    found, expected = (nnx.state(nnx.jit(gradient)(layer)) for layer in (fused, plain))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    assert bool(jnp.any(found["value"]["down"][...] != 0))


def test_over_a_cache_too():
    fused, plain = _pair()
    outs = []
    for layer in (fused, plain):
        _wrap(layer, "key")
        out, cache = layer.with_cache(X[:, :3], layer.new_cache(2, 5))
        outs.append(jnp.concatenate([out, layer.with_cache(X[:, 3:], cache)[0]], 1))
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)


def test_made_projections_are_one_product(flavour):
    def make(library, **more):
        return library.MultiHeadAttention(2, 8, num_kv_heads=1, fused_qkv=True, **more)

    def products(run):
        return str(jax.make_jaxpr(run)(X)).count("f32[8,16]")

    assert products(lambda x: Made(flavour, make)(x)) > 0


def test_captured_outputs_of_nnx_are_complete():
    fused, plain = _pair()
    captured = []
    for layer in (fused, plain):
        run = nnx.capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)
        captured.append(run(X)[1])
    assert set(captured[0]) >= {"query", "key", "value"}
    for x, y in zip(*map(jax.tree.leaves, captured), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def _linen(fused, cls=linen.MultiHeadAttention):
    options = {"num_kv_heads": 1, "normalize_qk": True, "fused_qkv": fused}
    return cls(2, 8, bias_init=nn.initializers.normal(1.0), **options)


VARIABLES = _linen(True).init(jax.random.key(0), X)


def _outputs(next_fun, args, kwargs, context):
    out = next_fun(*args, **kwargs)
    if context.module.name == "value" and context.method_name == "__call__":
        return out + args[0].sum(-1)[..., None, None]
    return out


def _inputs(next_fun, args, kwargs, context):
    if context.module.name == "key" and context.method_name == "__call__":
        args = (args[0] * 2, *args[1:])
    return next_fun(*args, **kwargs)


def _stopped(next_fun, args, kwargs, context):
    if context.module.name == "query" and context.method_name == "__call__":
        args = (jax.lax.stop_gradient(args[0] + 1), *args[1:])
    return next_fun(*args, **kwargs)


def _norms(next_fun, args, kwargs, context):
    out = next_fun(*args, **kwargs)
    return out * 2 if context.module.name == "query_ln" else out


@pytest.mark.parametrize("intercept", [_outputs, _inputs, _stopped, _norms])
def test_interceptors_of_linen_count(intercept):
    found, expected = [], []
    for results, fused in ((found, True), (expected, False)):

        def loss(variables, x, fused=fused):
            with nn.intercept_methods(intercept):
                out = _linen(fused).apply(variables, x)
            return jnp.sum(out**2), out

        results += jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1), has_aux=True))(VARIABLES, X))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    plain = _linen(False).apply(VARIABLES, X)
    assert not np.allclose(expected[-1], plain, atol=1e-3), "the interceptor shows nothing"


def test_captured_intermediates_of_linen_are_complete():
    captured = [
        _linen(fused).apply(VARIABLES, X, capture_intermediates=True)[1]["intermediates"]
        for fused in (True, False)
    ]
    assert set(captured[0]) >= {"query", "key", "value"}
    for name in ("query", "key", "value", "out"):
        x, y = (c[name]["__call__"][0] for c in captured)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


class Larger(nn.Module):
    """A projection of another kind, by the same call."""

    @nn.compact
    def __call__(self, x, features):
        return nn.DenseGeneral(features, name="base")(x) * self.param(
            "by", nn.initializers.ones, ()
        )


def test_a_projection_of_a_subclass_is_called():
    class Mine(linen.MultiHeadAttention):
        def setup(self):
            super().setup()
            self.mine = Larger()
            object.__setattr__(self, "value", self.mine)

    layers = [_linen(fused, Mine) for fused in (True, False)]
    variables = layers[1].init(jax.random.key(0), X)
    assert "mine" in variables["params"]
    found, expected = (layer.apply(variables, X) for layer in layers)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_heads_of_an_adapter_are_not_pruned(flavour):
    layer = modules.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    _wrap(layer, "value")
    with pytest.raises(NotImplementedError, match=r"'value' holds base, down, up"):
        modules.prune_heads(layer, [0])
    if flavour == "linen":
        changed = {**VARIABLES["params"]}
        changed["value"] = {**changed["value"], "lora": jnp.ones((8, 2))}
        with pytest.raises(NotImplementedError, match=r"'value' holds bias, kernel, lora"):
            linen.prune_heads(_linen(True), {"params": changed}, [0])
