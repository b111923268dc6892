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
    TransformerEncoder,
    TransformerEncoderLayer,
)
from tests.modules.linen_calls import apply, init

pytestmark = pytest.mark.thorough

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
            jax.jit(lambda v: layer.apply(v, *inputs, *flag))(variables),
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


def test_a_scanned_stack_is_its_layers_one_after_the_other():
    sizes, options = (3, 2, D, 16), {"norm": "pre", **RATES}
    scanned = TransformerEncoder(*sizes, scan_layers=True, remat="dots_saveable", **options)
    variables = init(scanned, X, deterministic=True)
    parts = variables["params"]["layers"]
    assert parts["mlp"]["hidden"]["kernel"].shape == (3, D, 16)
    assert not np.array_equal(*parts["mlp"]["hidden"]["kernel"][:2])
    each = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], parts) for i in range(3)}
    written = {"params": {"norm": variables["params"]["norm"], **each}}
    found = apply(scanned, variables, X, deterministic=True)
    expected = apply(TransformerEncoder(*sizes, **options), written, X, deterministic=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    # Training: the backward pass drops the same entries as the forward pass, key by key.
    def loss(variables, x, key):
        out = scanned.apply(variables, x, deterministic=False, rngs={"dropout": key})
        return jnp.sum(jnp.sin(out) * jnp.arange(float(D)).reshape(1, 1, D))

    train = jax.jit(jax.value_and_grad(loss, argnums=1))
    key, other = jax.random.split(jax.random.key(1))
    first, slope = train(variables, X, key)
    assert train(variables, X, key)[0] == first
    assert train(variables, X, other)[0] != first
    step = 1e-2 * jnp.sign(slope)
    up, down = (train(variables, X + s, key)[0] for s in (step, -step))
    np.testing.assert_allclose(up - down, 2 * jnp.sum(slope * step), rtol=2e-2)
    with pytest.raises(ValueError, match="dots_saved"):
        TransformerEncoder(*sizes, remat="dots_saved")


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
    layer = MultiHeadAttention(2, score="general")
    keys = jax.random.split(jax.random.key(0), 3)
    ensemble = jax.jit(jax.vmap(lambda key: layer.init(key, X)))(keys)
    outs = jax.jit(jax.vmap(lambda v: layer.apply(v, X)))(ensemble)
    run = jax.jit(lambda key: layer.apply(layer.init(key, X), X))
    for i, key in enumerate(keys):
        one = run(key)
        np.testing.assert_allclose(outs[i], one, rtol=1e-5, atol=1e-5)
