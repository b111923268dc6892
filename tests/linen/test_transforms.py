"""Linen layers under remat, scan, jit, vmap (case A25): the same numbers in both modes."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.linen import (
    MultiHeadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from tests.linen.tools import apply, init

B, T, D = 2, 5, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
MEMORY = jnp.asarray(np.random.default_rng(1).normal(size=(B, 3, D)), jnp.float32)
RATES = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}
KEY = {"dropout": jax.random.key(5)}
# The class, its inputs, and where `deterministic` stands among the arguments, self counted.
LAYERS = {
    "encoder": (TransformerEncoderLayer, (X, None), 3),
    "decoder": (TransformerDecoderLayer, (X, MEMORY, None, None), 5),
}


def gradient(layer, variables, inputs, **options):
    def loss(variables, x):
        out = layer.apply(variables, x, *inputs[1:], rngs=KEY, **options)
        return jnp.sum(jnp.sin(out)), out

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, inputs[0])


@pytest.mark.parametrize("deterministic", [True, False], ids=["eval", "train"])
@pytest.mark.parametrize("name", LAYERS)
def test_remat_changes_nothing_however_the_flag_is_given(name, deterministic):
    cls, inputs, place = LAYERS[name]
    options = {"num_heads": 2, "in_features": D, "mlp_features": 16, **RATES}
    plain = cls(**options)
    variables = init(plain, *inputs, deterministic=True)
    layer, flag = nn.remat(cls, static_argnums=(place,))(**options), (deterministic,)
    named = {"deterministic": deterministic}
    if deterministic:  # by position, then by name, then at construction
        expected = apply(plain, variables, *inputs, key=5, **named)
        found = [
            apply(layer, variables, *inputs, *flag),
            apply(nn.remat(cls)(**options), variables, *inputs, **named),
            apply(nn.remat(cls)(**options, **named), variables, *inputs),
        ]
        for out in found:
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        return
    expected = jax.jit(lambda v: gradient(plain, v, inputs, **named))(variables)
    if name == "encoder":
        found = jax.jit(lambda v: gradient(layer, v, (*inputs, *flag)))(variables)
    else:
        found = jax.jit(lambda v: gradient(nn.remat(cls)(**options), v, inputs, **named))(variables)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


class Stack(nn.Module):
    """Layers scanned, each recomputed in the backward pass, or one after the other."""

    layers: int
    scanned: bool

    @nn.compact
    def __call__(self, x, deterministic):
        options = {"num_heads": 2, "in_features": D, "mlp_features": 16, "name": "layer", **RATES}
        if not self.scanned:
            for i in range(self.layers):
                options["name"] = f"layer_{i}"
                x = TransformerEncoderLayer(**options)(x, None, deterministic)
            return x

        def body(layer, x, _):
            return layer(x, None, deterministic), None

        scan = nn.scan(
            nn.remat(body),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        return scan(TransformerEncoderLayer(**options), x, None)[0]


def test_scan_over_layers():
    scanned, written = Stack(3, True), Stack(3, False)
    variables = init(scanned, X, deterministic=True)
    parts = variables["params"]["layer"]
    assert parts["mlp"]["hidden"]["kernel"].shape == (3, D, 16)
    assert not np.array_equal(*parts["mlp"]["hidden"]["kernel"][:2])
    each = {f"layer_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], parts) for i in range(3)}
    found = apply(scanned, variables, X, deterministic=True)
    expected = apply(written, {"params": each}, X, deterministic=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    # Training: every layer has a stream of its own, and the backward pass drops the same entries.
    train = jax.jit(
        jax.value_and_grad(lambda v, k: jnp.sum(scanned.apply(v, X, False, rngs={"dropout": k})))
    )
    first, slope = train(variables, jax.random.key(1))
    assert train(variables, jax.random.key(1))[0] == first
    assert train(variables, jax.random.key(2))[0] != first
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


def test_dropout_under_scan_differs_from_layer_to_layer():
    class Noise(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            kept = MultiHeadAttention(
                1, dropout_rate=0.5, deterministic=False, name="attention", use_bias=False
            )(x)
            return x, kept

    noisy = nn.scan(
        Noise,
        variable_broadcast="params",
        split_rngs={"params": False, "dropout": True},
        length=3,
    )()
    outs = apply(noisy, init(noisy, X, None), X, None, key=5)[1]
    for i, j in ((0, 1), (1, 2)):
        assert not np.allclose(outs[i], outs[j])


def test_vmap_over_parameters_makes_an_ensemble():
    layer = MultiHeadAttention(2, score="additive", positions="relative_bias")
    keys = jax.random.split(jax.random.key(0), 3)
    ensemble = jax.jit(jax.vmap(lambda key: layer.init(key, X)))(keys)
    outs = jax.jit(jax.vmap(lambda v: layer.apply(v, X)))(ensemble)
    run = jax.jit(lambda key: layer.apply(layer.init(key, X), X))
    for i, key in enumerate(keys):
        one = run(key)
        np.testing.assert_allclose(outs[i], one, rtol=1e-5, atol=1e-5)
