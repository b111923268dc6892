"""Flax's `MultiHeadDotProductAttention` and ours: one checkpoint, equal numbers and gradients."""

import dataclasses
import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import masks
from attention_jax.linen import MultiHeadAttention
from tests.modules.linen_calls import apply, init

RNG = np.random.default_rng(0)
X, STATES = (jnp.asarray(RNG.normal(size=(2, n, 12)), jnp.float32) for n in (5, 7))
CONFIGURATIONS = {
    "odd": {
        "num_heads": 3,
        "qkv_features": 15,
        "normalize_qk": True,
        "use_bias": False,
        "out_kernel_init": nn.initializers.normal(0.3),
    },
    "biased": {"num_heads": 2, "out_features": 5, "bias_init": nn.initializers.normal(1.0)},
}


@functools.partial(jax.jit, static_argnums=0)
def run(layer, variables, x, states):
    """The output, and the gradients of parameters and inputs."""

    def loss(variables, x, states):
        out = layer.apply(variables, x, states)
        return jnp.sum(jnp.sin(out) * jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)), out

    with jax.numpy_dtype_promotion("standard"):
        gradients, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(variables, x, states)
    return out, gradients


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_checkpoint_and_a_seed_serve_both(name):
    options = CONFIGURATIONS[name]
    theirs, ours = nn.MultiHeadDotProductAttention(**options), MultiHeadAttention(**options)
    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm promotes
        variables = init(theirs, X, STATES)
    chex.assert_trees_all_equal(init(ours, X, STATES), variables)
    found, expected = (run(layer, variables, X, STATES) for layer in (ours, theirs))
    chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)


def test_masks_mean_the_same():
    theirs, ours = nn.MultiHeadDotProductAttention(2), MultiHeadAttention(2)
    variables = init(theirs, X)
    lengths = jnp.array([5, 2])
    seen = (jnp.arange(5)[None] < lengths[:, None]).astype(jnp.float32)
    flax_mask = nn.combine_masks(
        nn.make_causal_mask(X[..., 0]), nn.make_attention_mask(jnp.ones((2, 5)), seen)
    ).astype(bool)
    expected = apply(theirs, variables, X, mask=flax_mask)
    for mask in (masks.causal() & masks.padding(lengths), np.asarray(flax_mask)):
        found = apply(ours, variables, X, mask=mask)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_compute_with_float32_parameters():
    options = {"num_heads": 2, "dtype": jnp.bfloat16, "normalize_qk": True}
    theirs, ours = nn.MultiHeadDotProductAttention(**options), MultiHeadAttention(**options)
    variables = init(ours, X)
    chex.assert_type(jax.tree.leaves(variables), jnp.float32)
    out = apply(ours, variables, X)
    chex.assert_type(out, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        expected = apply(theirs, variables, X)
    low = [x.astype(jnp.float32) for x in (out, expected)]
    np.testing.assert_allclose(*low, rtol=3e-2, atol=3e-2)


def test_partitioned_parameters_are_boxed_alike():
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
    options = {"num_heads": 2, "kernel_init": kernel}
    theirs = init(nn.MultiHeadDotProductAttention(**options), X)
    ours = init(MultiHeadAttention(**options), X)
    assert ours["params"]["query"]["kernel"].names == (None, "model", None)
    chex.assert_trees_all_equal(ours, theirs)
    scored = init(MultiHeadAttention(**options, score="additive"), X)["params"]["score"]
    assert not any(isinstance(x, nn.Partitioned) for x in scored.values())  # it has other axes


def test_names_of_arguments_and_of_the_call_are_flax_s():
    theirs = {f.name for f in dataclasses.fields(nn.MultiHeadDotProductAttention)}
    ours = {f.name for f in dataclasses.fields(MultiHeadAttention)}
    shared = {
        *("num_heads", "dtype", "param_dtype", "qkv_features", "out_features"),
        *("broadcast_dropout", "dropout_rate", "deterministic", "precision", "kernel_init"),
        *("out_kernel_init", "bias_init", "out_bias_init", "use_bias", "decode", "normalize_qk"),
    }
    assert shared <= theirs & ours
    call = inspect.signature(MultiHeadAttention.__call__).parameters
    for name in inspect.signature(nn.MultiHeadDotProductAttention.__call__).parameters:
        assert name in call or name == "inputs_kv"  # deprecated there
