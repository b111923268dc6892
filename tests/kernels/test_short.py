"""Short sequences without a mask: the fused forward pass and the derivatives of the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels import short
from attention_jax.testing import reference_attention


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def flash(query, key, value, **options):
    return aj.attend(query, key, value, implementation="flash", **options)


@pytest.fixture
def used(monkeypatch):
    """Counts the requests that are computed in the fused form."""
    counted, fits = [], short.fits

    def counting(request):
        answer = fits(request)
        counted.append(answer)
        return answer

    monkeypatch.setattr(short, "fits", counting)
    return counted


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 37, 4, 8), (2, 21, 2, 8), (2, 21, 2, 5)),
        ((33, 3, 8), (70, 3, 8), (70, 3, 8)),
        ((2, 3, 1, 1, 4), (2, 3, 90, 1, 4), (2, 3, 90, 1, 4)),
    ],
)
def test_is_the_reference(query, key, value, used):
    arrays = [normal(seed, *shape) for seed, shape in enumerate((query, key, value))]
    score = aj.scores.scaled_dot(jnp.asarray(0.7))
    wanted = reference_attention(*arrays, scale=0.7).out
    np.testing.assert_allclose(flash(*arrays, score=score), wanted, rtol=1e-5, atol=1e-6)
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        assert used == [True]


def test_derivatives_are_those_of_the_loop():
    arrays = [normal(seed, 2, 40, 2, 4) for seed in range(3)]
    moves = [normal(seed, 2, 40, 2, 4) for seed in range(3, 6)]

    def everything(**options):
        def loss(*arrays):
            return jnp.sum(jnp.sin(flash(*arrays, **options)))

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jit(
            lambda points, moves: (
                jax.jvp(lambda *x: flash(*x, **options), points, moves),
                jax.jvp(gradient, points, moves),
                jax.vmap(lambda *x: flash(*x, **options))(*points),
            )
        )(arrays, moves)

    # blocks that are asked for are walked
    for got, wanted in zip(
        jax.tree.leaves(everything()), jax.tree.leaves(everything(block_size=40)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_else_is_asked_for_is_not_passed_over(used):
    arrays = [normal(seed, 1, 32, 1, 4) for seed in range(3)]
    aj.attend_with_stats(*arrays, implementation="flash")
    for options in (
        {"mask": aj.masks.causal()},
        {"bias": jnp.zeros((32, 32))},
        {"block_size": 16},
        {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
        {"score": aj.scores.soft_cap(aj.scores.dot(), 1.0)},
    ):
        jax.eval_shape(lambda *x, options=options: flash(*x, **options), *arrays)
    assert used == [False] * 6
