"""Attention is recorded inside every transformation, with the same statistics as outside."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax.diagnostics import attention_stats, capture, head_importance, mask_heads
from attention_jax.nnx import MultiHeadAttention

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
LAYER = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
LINEN = linen.MultiHeadAttention(num_heads=2)
VARIABLES = jax.jit(LINEN.init)(jax.random.key(0), X)
NAME = "MultiHeadAttention"


def mapped(x):
    return jax.vmap(lambda row: jax.checkpoint(lambda y: LAYER(y))(row))(x)


def derivative(x):
    return jax.grad(lambda y: (LAYER(y) ** 2).sum())(x)


ONCE = {
    "a function that calls a module": lambda x: LAYER(x),
    "jit and vmap and remat": jax.jit(mapped),
    "a derivative": derivative,
}


@pytest.fixture(scope="module")
def plain():
    return capture(LAYER, X)[NAME]


@pytest.mark.parametrize("name", ONCE)
def test_transformations_do_not_change_the_statistics(name, plain):
    found = capture(ONCE[name], X)
    assert list(found) == [NAME]
    for row in ("entropy", "visible", "mean_key", "largest", "bad"):
        np.testing.assert_allclose(getattr(found[NAME], row), getattr(plain, row), rtol=1e-5)
    assert found[NAME].per_head("entropy").shape == (2,)
    assert found[NAME].facts.batch_axes == 1
    np.testing.assert_allclose(found.output, ONCE[name](X), rtol=1e-4, atol=1e-5)


def test_a_module_as_an_argument_of_a_function(plain):
    found = capture(nnx.jit(lambda layer, x: layer(x)), LAYER, X)
    np.testing.assert_allclose(found[NAME].entropy, plain.entropy, rtol=1e-5)


@pytest.mark.parametrize(
    "model", [LINEN.bind(VARIABLES), functools.partial(LINEN.apply, VARIABLES)]
)
def test_linen_modules_that_are_bound_or_applied(model):
    found = capture(model, X)
    wanted = capture(LINEN, X, variables=VARIABLES)
    np.testing.assert_allclose(found[NAME].entropy, wanted[NAME].entropy, rtol=1e-5)


class Scanned(nn.Module):
    """Linen layers in a scan of the user."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return linen.MultiHeadAttention(num_heads=2, name="own")(x), None

        repeated = nn.scan(
            Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return repeated(name="layers")(x, None)[0]


@pytest.mark.thorough
def test_layers_in_a_scan_of_the_user_have_indexed_paths_and_gates():
    model = Scanned()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    found = capture(model, X, variables=variables)
    assert list(found) == [f"layers/own[{i}]" for i in range(3)]
    each = [
        jax.tree.map(lambda x, i=i: x[i], variables["params"]["layers"]["own"]) for i in range(3)
    ]
    x = X
    for i, params in enumerate(each):
        wanted = capture(LINEN, x, variables={"params": params})
        np.testing.assert_allclose(
            found[f"layers/own[{i}]"].entropy, wanted[NAME].entropy, rtol=1e-4, atol=1e-5
        )
        x = wanted.output
    masked = mask_heads(model, X, heads={"layers/own[2]": [0, 1]}, variables=variables)
    np.testing.assert_allclose(
        masked, np.broadcast_to(each[2]["out"]["bias"], X.shape), rtol=1e-5, atol=1e-6
    )
    importance = head_importance(model, X, loss=lambda y: (y**2).mean(), variables=variables)
    assert list(importance) == list(found)


@pytest.mark.thorough
def test_conditions_loops_and_a_model_that_returns_statistics():
    def either(x, flag):
        layer = MultiHeadAttention(2, 8, dropout_rate=0.5, rngs=nnx.Rngs(0))
        return layer(x, deterministic=flag)

    found = capture(either, X, jnp.array(True))
    assert found[NAME].entropy.shape == (2, 2, 5)

    def attend(x):
        return aj.attend(x, x, x)

    x = X[:, :, None]
    with pytest.raises(NotImplementedError, match="in one branch of a 'cond'"):
        capture(lambda x, n: jax.lax.cond(n > 0, attend, lambda x: x, x), x, jnp.array(1))
    with pytest.raises(NotImplementedError, match="attention inside 'while'"):
        capture(lambda x: jax.lax.while_loop(lambda x: x[0, 0, 0, 0] < 0, attend, x), x)

    mask = np.tril(np.ones((5, 5), bool), -1)
    found = capture(lambda x: aj.attend_with_stats(x, x, x, mask=mask)[1], x)
    wanted = aj.attend_with_stats(x, x, x, mask=mask)[1]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found.output, wanted)


def test_arrays_in_a_closure_may_change_between_captures():
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))

    def model(x):
        return layer(x)

    before = capture(model, X)[NAME]
    layer.query.kernel[...] = layer.query.kernel[...] * 0.0
    after = capture(model, X)[NAME]
    assert (np.asarray(before.relative_entropy) < 1).all()
    np.testing.assert_allclose(after.relative_entropy, 1, rtol=1e-5)


def test_statistics_inside_a_loss_are_differentiable_through_scans():
    def model(x):
        def body(x, _):
            return jax.checkpoint(lambda y: jnp.tanh(LAYER(y)))(x), None

        return jax.lax.scan(body, x, None, length=2)[0]

    def loss(x):
        _, stats = attention_stats(model, x)
        return stats[NAME].entropy.sum()

    def unrolled(x):
        total = 0.0
        for _ in range(2):
            out, stats = LAYER.with_stats(x)
            total, x = total + stats.entropy.sum(), jnp.tanh(out)
        return total

    got, wanted = (jax.jit(jax.grad(f))(X) for f in (loss, unrolled))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_real_must_fit_an_attention():
    with pytest.raises(
        ValueError, match=r"real\['\*'\] \[2, 4\] .* MultiHeadAttention has \[2, 5\]"
    ):
        capture(LAYER, X, real=np.ones((2, 4), bool))
