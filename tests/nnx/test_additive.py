"""AdditiveAttention against the float64 reference, and its promises."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import AdditiveAttention
from attention_jax.testing import reference_attention

T, S = 5, 7
LENGTHS = np.array([7, 3])


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_additive_attention_equals_the_reference(implementation):
    layer = AdditiveAttention(6, 10, 8, implementation=implementation, rngs=nnx.Rngs(0))
    query, key, value = _normal(2, T, 6), _normal(2, S, 10, seed=1), _normal(2, S, 3, seed=2)
    mask = (np.arange(S) < LENGTHS[:, None])[:, None, None, :]
    params = {name: getattr(layer.score, name)[...] for name in ("w_query", "w_key", "v")}
    assert {k: v.shape for k, v in params.items()} == {
        "w_query": (6, 8),
        "w_key": (10, 8),
        "v": (8,),
    }
    arrays = (x[..., None, :] for x in (query, key, value))
    found = reference_attention(*arrays, score="additive", params=params, mask=mask)
    call = {"mask": aj.masks.padding(jnp.asarray(LENGTHS))}

    @nnx.jit
    def run(layer, query, key, value):
        out = layer(query, key, value, **call)
        weights = layer.attention_weights(query, key, **call)
        own = layer(query, key), layer(query, key, key)
        return out, layer.with_stats(query, key, value, **call), weights, own

    again, (out, stats), weights, own = run(layer, query, key, value)
    np.testing.assert_allclose(out, found.out[..., 0, :], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, out, atol=1e-6)
    np.testing.assert_allclose(stats.lse, found.lse, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights, found.weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(*own)


def test_additive_attention_masks_at_construction_and_in_bfloat16():
    mask = aj.masks.window(1, 1)
    layer = AdditiveAttention(6, 6, 8, mask=mask, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = _normal(T, 6)
    assert layer(x, x).dtype == jnp.bfloat16
    seen = np.asarray(layer.attention_weights(x, x))[0] > 0
    np.testing.assert_array_equal(seen, mask.to_array(T, T))
