"""The promises of every module, in Linen: masks, dropout, starts, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.linen import MultiHeadAttention, TransformerEncoderLayer
from tests.modules.linen_calls import apply, init

B, T, D = 2, 6, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
CAUSAL = aj.masks.causal()


def test_padding_that_is_no_number_spoils_nothing_though_it_looks_itself():
    layer = TransformerEncoderLayer(2, D, 8)
    mask, variables = jnp.arange(T) < 3, init(layer, X)

    def loss(variables, x):
        out = layer.apply(variables, x, mask[None, None, None])
        return jnp.sum(out[:, :3] * X[:, :3]), out[:, 3:]

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    spoiled, loud = run(variables, X.at[:, 3:].set(jnp.nan))
    assert np.isnan(loud).all()
    for a, b in zip(jax.tree.leaves(run(variables, X)[0]), jax.tree.leaves(spoiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_score_may_be_drawn_by_a_function():
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
    variables = init(layer, X)
    (table,) = jax.tree.leaves(variables["params"]["score"])
    (numbers,) = jax.tree.leaves(variables["constants"])  # they do not train
    np.testing.assert_array_equal(numbers, rows)
    weights = apply(layer, variables, X, method="attention_weights")
    expected = jax.nn.softmax(table[rows])
    np.testing.assert_allclose(weights[0, 0], np.broadcast_to(expected, (T, T)), rtol=1e-5)
    with pytest.raises(TypeError, match=r"factory.*Score.*int"):
        init(MultiHeadAttention(2, score=lambda heads, depth, key: 1), X)
