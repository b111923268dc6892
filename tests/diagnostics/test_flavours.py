"""`capture` of Linen modules, and of Flax's own modules of both flavours with our attention."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax.diagnostics import attention_stats, capture
from attention_jax.nnx import attention_fn

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)


class Mixed(nn.Module):
    """One of our layers, and one of Flax's with our attention."""

    @nn.compact
    def __call__(self, x):
        x = linen.MultiHeadAttention(num_heads=2, mask=aj.masks.causal(), name="ours")(x)
        flax = nn.MultiHeadDotProductAttention(
            num_heads=2, attention_fn=linen.attention_fn(score=aj.scores.cosine(3.0)), name="flax"
        )
        return flax(x)


def test_linen_modules_are_found_by_path():
    model = Mixed()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    found = capture(model, X, variables=variables, loss=lambda y: (y**2).mean(), weights=True)
    assert list(found) == ["ours", "flax"]
    plain = jax.jit(model.apply)(variables, X)
    np.testing.assert_allclose(found.output, plain, rtol=1e-5, atol=1e-5)
    assert found["ours"].visible[0, 0].tolist() == [1, 2, 3, 4, 5]
    assert found["flax"].facts.kind == "MultiHeadDotProductAttention"
    assert set(found.gradient_norms["flax"]) == {"query", "key", "value", "out", "all"}
    assert found.gradient_norms["ours"]["all"] > 0
    _, stats = jax.jit(lambda v: attention_stats(model, X, variables=v))(variables)
    np.testing.assert_allclose(stats["flax"].entropy, found["flax"].entropy, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="pass variables="):
        capture(model, X)


def test_flax_s_own_nnx_module_with_our_attention_is_found():
    layer = nnx.MultiHeadAttention(
        2, 8, attention_fn=attention_fn(mask=aj.masks.causal()), decode=False, rngs=nnx.Rngs(0)
    )
    found = capture(layer, X, weights=True)
    assert list(found) == ["MultiHeadAttention"]
    record = found["MultiHeadAttention"]
    np.testing.assert_allclose(record.weights.sum(-1), 1, rtol=1e-5)
    assert record.visible[0, 0].tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(found.output, jax.jit(lambda x: layer(x))(X), rtol=1e-5, atol=1e-5)
