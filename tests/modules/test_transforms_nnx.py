"""Layers under jit, grad, remat and vmap (case A25): the same numbers, training or evaluating."""

import chex
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import (
    MultiHeadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)

pytestmark = pytest.mark.thorough

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
MEMORY = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 8)), jnp.float32)
RATES = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}

LAYERS = {
    "attention": lambda: MultiHeadAttention(2, 8, dropout_rate=0.1, rngs=nnx.Rngs(0)),
    "encoder": lambda: TransformerEncoderLayer(2, 8, 16, **RATES, rngs=nnx.Rngs(0)),
    "decoder": lambda: TransformerDecoderLayer(2, 8, 16, norm="pre", **RATES, rngs=nnx.Rngs(0)),
}


def _call(layer, x, memory, deterministic):
    inputs = (x,) if isinstance(layer, TransformerEncoderLayer) else (x, memory)
    return layer(*inputs, deterministic=deterministic)


def _gradient(call, layer, deterministic):
    def loss(layer, x, memory):
        return jnp.sum(jnp.sin(call(layer, x, memory, deterministic)))

    value, (parameters, *inputs) = nnx.value_and_grad(loss, argnums=(0, 1, 2))(layer, X, MEMORY)
    return value, nnx.to_pure_dict(parameters), inputs


def _by_keyword(layer, x, memory, deterministic):
    run = nnx.remat(lambda layer, x, memory: _call(layer, x, memory, deterministic=deterministic))
    return run(layer, x, memory)


_by_position = nnx.remat(_call, static_argnums=(3,))


@pytest.mark.parametrize("deterministic", [True, False], ids=["eval", "train"])
@pytest.mark.parametrize("name", LAYERS)
def test_remat_and_jit_change_nothing(name, deterministic):
    jitted = nnx.jit(_gradient, static_argnums=(0, 2))
    call = _by_position if deterministic else _by_keyword
    expected = jitted(_call, LAYERS[name](), deterministic)
    found = [jitted(call, LAYERS[name](), deterministic)]
    if name == "attention" and not deterministic:
        found.append(_gradient(_by_position, LAYERS[name](), deterministic))
    for result in found:
        chex.assert_trees_all_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_flag_that_is_traced_says_the_same(name):
    """Case A25: remat traces what it is not told to leave alone, the flag among it."""
    run = nnx.jit(lambda layer, flag: nnx.remat(_call)(layer, X, MEMORY, flag))
    for flag in (True, False):
        expected = _call(LAYERS[name](), X, MEMORY, flag)
        np.testing.assert_allclose(run(LAYERS[name](), flag), expected, rtol=1e-4, atol=1e-5)


def test_remat_advances_the_layer_s_own_stream():
    layer = LAYERS["encoder"]()
    run = nnx.remat(lambda layer, x: layer(x, deterministic=False))
    assert not np.array_equal(run(layer, X), run(layer, X))


def test_vmap_over_an_axis_in_front_equals_a_loop():
    layer = LAYERS["decoder"]()
    lengths = jnp.array([[7, 3], [1, 0], [2, 7]])
    x, memory = jnp.stack([X, X + 1, X * 2]), jnp.stack([MEMORY, MEMORY - 1, MEMORY * 2])

    def run(x, memory, lengths):
        return layer(x, memory, None, aj.masks.padding(lengths), deterministic=True)

    mapped, one = jax.jit(jax.vmap(run))(x, memory, lengths), jax.jit(run)
    looped = jnp.stack([one(*each) for each in zip(x, memory, lengths, strict=True)])
    np.testing.assert_allclose(mapped, looped, rtol=1e-5, atol=1e-5)


def test_vmap_over_layers_makes_an_ensemble():
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(key):
        return MultiHeadAttention(2, 8, score="additive", rngs=nnx.Rngs(key))

    ensemble = build(jax.random.split(jax.random.key(0), 3))
    run = nnx.jit(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None)))
    outs = run(ensemble, X)
    graph, state = nnx.split(ensemble)
    one = jax.jit(lambda state: nnx.merge(graph, state)(X))
    for i in range(3):
        alone = one(jax.tree.map(lambda leaf, i=i: leaf[i], state))
        np.testing.assert_allclose(outs[i], alone, rtol=1e-5, atol=1e-5)


def test_scan_over_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(key):
        return TransformerEncoderLayer(2, 8, 16, rngs=nnx.Rngs(key))

    stack = build(jax.random.split(jax.random.key(0), 2))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return layer(x)

    graph, state = nnx.split(stack)
    one, x = jax.jit(lambda state, x: nnx.merge(graph, state)(x)), X
    for i in range(2):
        x = one(jax.tree.map(lambda leaf, i=i: leaf[i], state), x)
    np.testing.assert_allclose(nnx.jit(run)(X, stack), x, rtol=1e-5, atol=1e-5)


@pytest.mark.devices(4)
@pytest.mark.parametrize("deterministic", [True, False], ids=["eval", "train"])
def test_a_sharded_batch_gives_the_same_numbers(deterministic):
    """Case A26: dropout too is the same for the same key, wherever a row is computed."""
    layer = MultiHeadAttention(2, 8, score="general", dropout_rate=0.1, rngs=nnx.Rngs(0))
    x = jnp.concatenate([X, -X])
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))

    @nnx.jit
    def run(layer, x, stream):
        return layer(x, deterministic=deterministic, rngs=stream)

    sharded = run(layer, jax.device_put(x, rows), nnx.Rngs(3))
    assert len(sharded.sharding.device_set) == 4
    np.testing.assert_allclose(sharded, run(layer, x, nnx.Rngs(3)), rtol=1e-5, atol=1e-6)


def test_a_mask_with_arrays_passes_through_every_transform():
    mask = aj.masks.padding(jnp.array([5, 2])) & aj.masks.causal()
    layer = MultiHeadAttention(2, 8, mask=mask, rngs=nnx.Rngs(0))
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def loss(parameters, x):
        return jnp.sum(nnx.merge(graph, parameters, rest)(x) ** 2)

    gradients = jax.jit(jax.grad(loss))(parameters, X)
    expected = nnx.grad(lambda layer: jnp.sum(layer(X) ** 2))(layer)
    chex.assert_trees_all_close(
        nnx.to_pure_dict(gradients), nnx.to_pure_dict(expected), rtol=1e-4, atol=1e-5
    )


def test_the_blockwise_gradient_of_a_layer_keeps_nothing_of_size_t_s():
    length = 96
    layer = MultiHeadAttention(
        2, 8, score="additive", implementation="blockwise", block_size=16, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(layer)
    x = jnp.ones((length, 8))
    jaxpr = jax.make_jaxpr(jax.grad(lambda s, x: jnp.sum(nnx.merge(graph, s)(x) ** 2)))(state, x)
    assert max(_sizes(jaxpr.jaxpr)) < length * length
    dense = MultiHeadAttention(2, 8, implementation="dense", rngs=nnx.Rngs(0))
    graph, state = nnx.split(dense)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x)
    assert max(_sizes(jaxpr.jaxpr)) >= length * length


def _sizes(jaxpr):
    """The sizes of all arrays in a jaxpr, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _sizes(inner)
