"""AdditiveAttention against the float64 reference, and its guarantees."""

import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.testing import reference_attention

T, S = 5, 7
LENGTHS = np.array([7, 3])


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_additive_attention_equals_the_reference(flavour, implementation):
    query, key, value = _normal(2, T, 6), _normal(2, S, 10, seed=1), _normal(2, S, 3, seed=2)
    options = {"implementation": implementation, "inputs": (query, key)}
    layer = flavour.layer("AdditiveAttention", 6, 10, 8, **options)
    mask = (np.arange(S) < LENGTHS[:, None])[:, None, None, :]
    params = layer.params["score"]
    assert {k: v.shape for k, v in params.items()} == {
        "w_query": (6, 8),
        "w_key": (10, 8),
        "v": (8,),
    }
    arrays = (x[..., None, :] for x in (query, key, value))
    found = reference_attention(*arrays, score="additive", params=params, mask=mask)
    call = {"mask": aj.masks.padding(jnp.asarray(LENGTHS))}
    out, stats = layer(query, key, value, method="with_stats", **call)
    np.testing.assert_allclose(out, found.out[..., 0, :], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer(query, key, value, **call), out, atol=1e-6)
    np.testing.assert_allclose(stats.lse, found.lse, rtol=1e-4, atol=1e-5)
    weights = layer(query, key, method="attention_weights", **call)
    np.testing.assert_allclose(weights, found.weights, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(layer(query, key), layer(query, key, key))


def test_additive_attention_masks_at_construction_and_in_bfloat16(flavour):
    mask, x = aj.masks.window(1, 1), _normal(T, 6)
    options = {"mask": mask, "dtype": jnp.bfloat16, "inputs": (x, x)}
    layer = flavour.layer("AdditiveAttention", 6, 6, 8, **options)
    assert layer(x, x).dtype == jnp.bfloat16
    seen = np.asarray(layer(x, x, method="attention_weights"))[0] > 0
    np.testing.assert_array_equal(seen, mask.to_array(T, T))
