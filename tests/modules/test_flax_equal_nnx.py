"""`flax.nnx.MultiHeadAttention` and ours: one checkpoint, equal numbers, equal gradients."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import masks
from attention_jax.nnx import MultiHeadAttention

# Each with the batch axes it is tried with.
CONFIGURATIONS = {
    "odd": ((2,), {"num_heads": 3, "in_features": 15, "bias_init": nnx.initializers.normal(1.0)}),
    "cross": (
        (),
        {"num_heads": 2, "in_features": 7, "in_kv_features": 5, "qkv_features": 6},
    ),
    "grouped": (
        (2, 3),
        {"num_heads": 6, "num_kv_heads": 3, "in_features": 12, "out_features": 5},
    ),
    "one_kv_head": (
        (2,),
        {
            "num_heads": 4,
            "num_kv_heads": 1,
            "in_features": 8,
            "use_bias": False,
            "out_kernel_init": nnx.initializers.normal(0.3),
        },
    ),
    "normalized": (
        (2,),
        {
            "num_heads": 2,
            "in_features": 8,
            "normalize_qk": True,
            "out_bias_init": nnx.initializers.ones_init(),
        },
    ),
}

METADATA = [f"{kind}_metadata" for kind in ("kernel", "out_kernel", "bias", "out_bias")]
METADATA += ["query_ln_scale_metadata", "key_ln_scale_metadata"]


def _pair(**options):
    """Flax's layer and ours, with different parameters."""
    theirs = nnx.MultiHeadAttention(decode=False, rngs=nnx.Rngs(0), **options)
    return theirs, MultiHeadAttention(rngs=nnx.Rngs(1), **options)


def _inputs(options, batch=(2,), T=5, S=7):
    rng = np.random.default_rng(0)
    width = options.get("in_kv_features", options["in_features"])
    query = rng.normal(size=(*batch, T, options["in_features"])).astype(np.float32)
    states = rng.normal(size=(*batch, S, width)).astype(np.float32)
    return jnp.asarray(query), jnp.asarray(states)


@nnx.jit
def _run(layer, query, states):
    """The output, and the gradients of parameters and inputs."""

    def loss(layer, query, states):
        out = layer(query, states)
        return jnp.sum(jnp.sin(out) * jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)), out

    gradient = nnx.grad(loss, argnums=(0, 1, 2), has_aux=True)
    (parameters, *inputs), out = gradient(layer, query, states)
    return out, nnx.to_pure_dict(parameters), inputs


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_checkpoint_loads_either_way_and_gives_equal_outputs_and_gradients(name):
    batch, options = CONFIGURATIONS[name]
    theirs, ours = _pair(**options)
    query, states = _inputs(options, batch)
    mine = nnx.clone(nnx.state(ours))
    before = _run(ours, query, states)

    nnx.update(ours, nnx.state(theirs))
    found, expected = _run(ours, query, states), _run(theirs, query, states)
    chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert not np.allclose(before[0], found[0])

    nnx.update(theirs, mine)
    np.testing.assert_allclose(_run(theirs, query, states)[0], before[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["odd", "one_kv_head", "normalized"])
def test_one_seed_draws_the_same_parameters(name):
    options = {**CONFIGURATIONS[name][1], "dropout_rate": 0.1}
    theirs = nnx.MultiHeadAttention(decode=False, rngs=nnx.Rngs(5), **options)
    ours = MultiHeadAttention(rngs=nnx.Rngs(5), **options)
    chex.assert_trees_all_equal(
        nnx.to_pure_dict(nnx.state(ours, nnx.Param)), nnx.to_pure_dict(nnx.state(theirs, nnx.Param))
    )


def test_masks_mean_the_same():
    options = CONFIGURATIONS["odd"][1]
    theirs, ours = _pair(**options)
    nnx.update(ours, nnx.state(theirs))
    x, _ = _inputs(options)
    lengths = jnp.array([5, 2])
    flax_mask = nnx.make_causal_mask(x[..., 0]) * nnx.make_attention_mask(
        jnp.ones((2, 5)), (jnp.arange(5)[None] < lengths[:, None]).astype(jnp.float32)
    )
    expected = theirs(x, mask=flax_mask.astype(bool))
    for mask in (masks.causal() & masks.padding(lengths), flax_mask.astype(bool)):
        np.testing.assert_allclose(ours(x, mask=mask), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_compute_with_float32_parameters():
    options = {"num_heads": 2, "in_features": 8, "dtype": jnp.bfloat16, "normalize_qk": True}
    theirs, ours = _pair(**options)
    nnx.update(ours, nnx.state(theirs))
    x, states = _inputs(options)
    out = ours(x, states)
    chex.assert_type(out, jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(nnx.state(ours)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        expected = theirs(x, states)
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected.astype(jnp.float32), rtol=3e-2, atol=3e-2
    )


def test_float16_parameters():
    layer = MultiHeadAttention(
        2, 8, dtype=jnp.float16, param_dtype=jnp.float16, score="additive", rngs=nnx.Rngs(0)
    )
    chex.assert_type(jax.tree.leaves(nnx.state(layer)), jnp.float16)
    chex.assert_type(layer(jnp.ones((3, 8))), jnp.float16)


def test_argument_names_and_their_order_are_flax_s():
    theirs = list(inspect.signature(nnx.MultiHeadAttention.__init__).parameters)
    ours = list(inspect.signature(MultiHeadAttention.__init__).parameters)
    assert ours[:7] == theirs[:7]
    added = {"score", "mask", "positions", "value_features", "fused_qkv"}
    added |= {"implementation", "block_size", "force_fp32_for_softmax"}
    assert set(ours) - set(theirs) == added
    call = inspect.signature(MultiHeadAttention.__call__).parameters
    assert {"inputs_q", "inputs_k", "inputs_v", "mask", "deterministic", "rngs"} < set(call)


def test_a_layer_may_keep_no_stream():
    options = {"dropout_rate": 0.5, "deterministic": False}
    layer = MultiHeadAttention(2, 4, keep_rngs=False, rngs=nnx.Rngs(0), **options)
    assert layer.rngs is None
    nnx.split(layer, nnx.Param)
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="rngs"):
        layer(x)
    streams = nnx.Rngs(dropout=1)
    assert not np.array_equal(layer(x, rngs=streams), layer(x, rngs=streams))


def test_variables_carry_metadata():
    tags = {name: {"told": name} for name in METADATA}
    layer = MultiHeadAttention(2, 4, normalize_qk=True, rngs=nnx.Rngs(0), **tags)
    found = {
        "kernel_metadata": layer.value.kernel,
        "out_kernel_metadata": layer.out.kernel,
        "bias_metadata": layer.query.bias,
        "out_bias_metadata": layer.out.bias,
        "query_ln_scale_metadata": layer.query_ln.scale,
        "key_ln_scale_metadata": layer.key_ln.scale,
    }
    assert {name: variable.told for name, variable in found.items()} == {n: n for n in METADATA}
    layer = MultiHeadAttention(2, 4, kernel_metadata={"told": 1}, rngs=nnx.Rngs(0))
    assert layer.out.kernel.told == 1
    told = nnx.with_metadata(nnx.initializers.lecun_normal(), told=1)
    layer = MultiHeadAttention(2, 4, kernel_init=told, score="additive", rngs=nnx.Rngs(0))
    assert layer.key.kernel.told == 1  # of a projection; a score has other axes
    assert layer(jnp.ones((3, 4))).shape == (3, 4)
