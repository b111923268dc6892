"""What Flax tests of its attention, in our words, of our modules: Linen's and NNX's."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax import nnx as modules
from attention_jax.linen import MultiHeadAttention
from tests.modules.linen_calls import apply, init

ONES = {"kernel_init": nn.initializers.ones, "bias_init": nn.initializers.zeros}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)], ids=str)
def test_the_output_has_the_input_s_shape_whatever_the_batch_axes(batch):
    x = jnp.ones((*batch, 6, 5))
    layer = MultiHeadAttention(8, qkv_features=16, deterministic=False, **ONES)
    y, variables = jax.jit(layer.init_with_output)(jax.random.key(0), x)
    assert (y.shape, y.dtype) == (x.shape, jnp.float32)
    assert variables["params"]["query"]["kernel"].shape == (5, 8, 2)
    # All ones: every head has 5 everywhere, and the output adds 16 of them.
    np.testing.assert_allclose(y, 80.0, rtol=1e-6)


def test_a_forgotten_call_is_told():
    x = jnp.ones((1, 3, 8))
    theirs = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=linen.attention_fn)
    layer = nnx.MultiHeadAttention(
        2, 8, decode=False, attention_fn=modules.attention_fn, rngs=nnx.Rngs(0)
    )
    for call in (lambda: theirs.init(jax.random.key(0), x), lambda: layer(x)):
        with pytest.raises(TypeError, match=r"attention_fn=attention_fn\(\), with the call"):
            call()


def test_keys_and_values_follow_what_is_not_given():
    layer = MultiHeadAttention(2, qkv_features=6)
    query, states = normal(3, 5), normal(9, 5, seed=1)
    variables = init(layer, query, states)
    out = apply(layer, variables, query, states)
    np.testing.assert_array_equal(out, apply(layer, variables, query, states, states))
    own = apply(layer, variables, query)
    np.testing.assert_array_equal(own, apply(layer, variables, query, query))
    assert not np.allclose(own, out[:, :5])
    with pytest.raises(ValueError, match=r"inputs_v.*inputs_k"):
        layer.apply(variables, query, inputs_v=states)


class Two(nn.Module):
    """Two layers in one module, for what tells them apart."""

    attend: type = MultiHeadAttention

    @nn.compact
    def __call__(self, x, dropout_rng=None, sow=(False, False)):
        options = {"num_heads": 8, "qkv_features": 16, "dropout_rate": 0.5, "deterministic": False}
        return tuple(
            self.attend(**options, **ONES)(x, x, dropout_rng=dropout_rng, sow_weights=s)
            for s in sow
        )


@jax.jit
def run_two(variables, x, options):
    return Two().apply(variables, x, **options)


def test_dropout_takes_the_stream_or_the_key_of_the_call():
    x = jnp.ones((4, 2, 3, 5))
    keys = jax.random.split(jax.random.key(0), 4)
    variables = jax.jit(Two().init)({"params": keys[0], "dropout": keys[1]}, x)

    def run(**options):
        return run_two(variables, x, options)

    a, b = run(rngs={"dropout": keys[1]})
    assert not np.array_equal(a, b)
    again = run(rngs={"dropout": keys[1], "params": keys[0]})
    np.testing.assert_array_equal(again, (a, b))
    c, d = run(rngs={"dropout": keys[2]})
    assert not np.array_equal(a, c)
    assert not np.array_equal(b, d)
    for rngs in ({}, {"dropout": keys[2]}):
        e, f = run(rngs=rngs, dropout_rng=keys[3])
        np.testing.assert_array_equal(e, f)
        assert e.shape == x.shape


def test_without_dropout_no_stream_changes_anything():
    x = normal(4, 3, 5)
    layer = MultiHeadAttention(5, deterministic=True)
    variables = init(layer, x)
    outs = [apply(layer, variables, x, key=key) for key in (0, 1)]
    dropping = MultiHeadAttention(5, dropout_rate=0.5, deterministic=False)
    outs += [apply(dropping, variables, x, deterministic=True, key=key) for key in (0, None)]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_weights_are_sown_by_the_layers_that_are_asked():
    x = jnp.ones((4, 6, 5))
    variables, options = init(Two(), x), {"key": 1, "mutable": ["intermediates"]}
    _, found = apply(Two(), variables, x, sow=(False, True), **options)
    (only,) = found["intermediates"]
    assert only == "MultiHeadAttention_1"
    (weights,) = found["intermediates"][only]["attention_weights"]
    assert weights.shape == (4, 8, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)  # before dropout
    assert "intermediates" not in apply(Two(), variables, x, **options)[1]


def test_submodules_are_named_by_their_class():
    x = normal(2, 5)

    class Renamed(MultiHeadAttention):
        pass

    first, second = (
        jax.eval_shape(Two(cls).init, jax.random.key(0), x)["params"]
        for cls in (MultiHeadAttention, Renamed)
    )
    assert set(first) == {"MultiHeadAttention_0", "MultiHeadAttention_1"}
    assert set(second) == {"Renamed_0", "Renamed_1"}


def test_decoding_over_two_spatial_axes():
    x = normal(2, 3, 5, 12)
    layer = MultiHeadAttention(3, deterministic=False, precision=jax.lax.Precision.HIGHEST)
    steps = layer.clone(decode=True)
    variables = init(steps, x)
    mask = nn.make_causal_mask(jnp.ones((2, 3, 5))).astype(bool)
    expected = apply(layer, {"params": variables["params"]}, x, mask=mask)

    def step(cache, token):
        out, changed = steps.apply(
            {"params": variables["params"], **cache}, token[:, :, None], mutable=["cache"]
        )
        return changed, out[:, :, 0]

    cache = {"cache": variables["cache"]}
    _, out = jax.lax.scan(step, cache, jnp.moveaxis(x, 2, 0))
    np.testing.assert_allclose(jnp.moveaxis(out, 0, 2), expected, atol=1e-5)


def test_decoding_with_64_bits():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = jnp.ones((1, 4, 4))
        assert x.dtype == jnp.float64
        layer = MultiHeadAttention(2, decode=True)
        variables = jax.jit(layer.init)(jax.random.PRNGKey(0), x, x, x)
        step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
        for t in range(2):
            out, changed = step(variables, x[:, t : t + 1])
            variables = {**variables, **changed}
            assert out.shape == (1, 1, 4)
        assert variables["cache"]["cache_index"] == 2


def test_a_score_may_be_drawn_by_a_function():
    x = normal(2, 6, 8)
    rows = jnp.array([0, 2, 1, 1, 0, 2])

    def make(heads, depth, key):
        table = jax.random.normal(key, (3,))
        look = jax.tree_util.Partial(
            lambda table, rows, q, k, t, s: table[rows[s]][None] + jnp.zeros((t.shape[0], 1)),
            table,
            rows,
        )
        return aj.scores.custom(look)

    layer = MultiHeadAttention(2, score=make)
    variables = init(layer, x)
    (table,) = jax.tree.leaves(variables["params"]["score"])
    (numbers,) = jax.tree.leaves(variables["constants"])  # they do not train
    np.testing.assert_array_equal(numbers, rows)
    weights = apply(layer, variables, x, method="attention_weights")
    expected = jax.nn.softmax(table[rows])
    np.testing.assert_allclose(weights[0, 0], np.broadcast_to(expected, (6, 6)), rtol=1e-5)
    with pytest.raises(TypeError, match=r"factory.*Score.*int"):
        init(MultiHeadAttention(2, score=lambda heads, depth, key: 1), x)
