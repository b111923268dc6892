"""The dtype of weights that are sown or returned, as in Flax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import linen
from attention_jax import nnx as modules
from tests.modules.flavours import Made

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.bfloat16)
DTYPES = {True: jnp.float32, False: jnp.bfloat16}


def _rows_sum_to_one(weights, force):
    assert weights.dtype == DTYPES[force]
    total = np.asarray(weights, np.float64).sum(-1)
    np.testing.assert_allclose(total, 1, atol=1e-6 if force else 1e-2)


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("decode", [False, True])
def test_our_layers(force, decode, flavour):
    options = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": force, "decode": decode}
    if flavour == "nnx":
        layer = modules.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0))
        if decode:
            layer.init_cache(X.shape)
        out = layer(X, sow_weights=True, is_causal=not decode)
        weights = nnx.pop(layer, nnx.Intermediate)["attention_weights"][0]
        returned = layer.attention_weights(X)
    else:
        layer = linen.MultiHeadAttention(2, 8, **options)
        variables = layer.init(jax.random.key(0), X)
        mutable = ["intermediates", "cache"]
        given = {"sow_weights": True, "is_causal": not decode, "mutable": mutable}
        out, changed = layer.apply(variables, X, **given)
        weights = changed["intermediates"]["attention_weights"][0]
        returned = layer.apply(variables, X, method="attention_weights")
    assert out.dtype == jnp.bfloat16
    _rows_sum_to_one(weights, force)
    _rows_sum_to_one(returned, force)


def test_float32_weights_change_no_output(flavour):
    def make(force):
        return lambda library, **more: library.MultiHeadAttention(
            2, 8, force_fp32_for_softmax=force, **more
        )

    x = X.astype(jnp.float32)
    found, expected = (Made(flavour, make(force))(x) for force in (True, False))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("force", [True, False])
def test_the_function_for_flax(force, flavour):
    query = jnp.stack([X] * 2, axis=-2)
    fn = (modules if flavour == "nnx" else linen).attention_fn()
    if flavour == "nnx":
        fn = functools.partial(fn, force_fp32_for_softmax=force)
        layer = nnx.MultiHeadAttention(
            2, 8, decode=False, attention_fn=fn, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
        )
        sown = nnx.capture(layer, nnx.Intermediate)(X, sow_weights=True)[1]
        (weights,) = sown["attention_weights"]
    else:
        layer = nn.MultiHeadDotProductAttention(
            2, attention_fn=fn, dtype=jnp.bfloat16, force_fp32_for_softmax=force
        )
        variables = layer.init(jax.random.key(0), X)
        _, sown = layer.apply(variables, X, sow_weights=True, mutable=["intermediates"])
        (weights,) = sown["intermediates"]["attention_weights"]
    _rows_sum_to_one(weights, force)
    assert fn(query, query, query, force_fp32_for_softmax=force).dtype == jnp.bfloat16


def test_a_flag_that_is_none_is_refused(flavour):
    with pytest.raises(TypeError, match="force_fp32_for_softmax"):
        Made(
            flavour,
            lambda library, **more: library.MultiHeadAttention(
                2, 8, force_fp32_for_softmax=1, **more
            ),
        )
