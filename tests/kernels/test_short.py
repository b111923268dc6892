"""Short sequences without a mask: the fused forward pass, and derivatives by recomputation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels import tiling
from attention_jax.testing import reference_attention


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def attend(*arrays, implementation="short", **options):
    return aj.attend(*arrays, implementation=implementation, **options)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 37, 4, 8), (2, 21, 2, 8), (2, 21, 2, 5)),
        ((33, 3, 8), (70, 3, 8), (70, 3, 8)),
        ((2, 3, 1, 1, 4), (2, 3, 90, 1, 4), (2, 3, 90, 1, 4)),
    ],
)
def test_is_the_reference(query, key, value):
    arrays = [normal(seed, *shape) for seed, shape in enumerate((query, key, value))]
    score = aj.scores.scaled_dot(jnp.asarray(0.7))
    wanted = reference_attention(*arrays, scale=0.7).out
    np.testing.assert_allclose(attend(*arrays, score=score), wanted, rtol=1e-5, atol=1e-6)


def test_derivatives_are_those_of_flash():
    arrays = [normal(seed, 2, 40, 2, 4) for seed in range(3)]
    moves = [normal(seed, 2, 40, 2, 4) for seed in range(3, 6)]

    def everything(implementation):
        def loss(*arrays):
            return jnp.sum(jnp.sin(attend(*arrays, implementation=implementation)))

        gradient = jax.grad(loss, (0, 1, 2))
        return jax.jit(
            lambda points, moves: (
                jax.jvp(loss, points, moves),
                jax.jvp(gradient, points, moves),
                jax.vmap(partial(attend, implementation=implementation))(*points),
            )
        )(arrays, moves)

    got, wanted = (jax.tree.leaves(everything(name)) for name in ("short", "flash"))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


REFUSED = {
    "mask": ({"mask": aj.masks.causal()}, "it does not support mask"),
    "bias": ({"bias": np.zeros((32, 32), np.float32)}, "it does not support bias"),
    "block_size": ({"block_size": 16}, "it does not support block_size"),
    "query_positions": ({"query_positions": np.arange(32)}, "it does not support query_positions"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": np.zeros(2, np.uint32)}, "no dropout"),
    "score": ({"score": aj.scores.soft_cap(aj.scores.dot(), 1.0)}, "soft_cap.*not a product"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_it_cannot_compute_is_refused(name):
    options, why = REFUSED[name]
    arrays = [normal(seed, 1, 32, 1, 4) for seed in range(3)]
    with pytest.raises(NotImplementedError, match=why):
        attend(*arrays, **options)


@pytest.mark.parametrize(("sizes", "why"), [((257, 9), "T = 257"), ((9, 257), "S = 257")])
def test_lengths_beyond_256_are_refused(sizes, why):
    query, key = (normal(0, size, 1, 4) for size in sizes)
    with pytest.raises(NotImplementedError, match=f"at most 256, got .*{why}"):
        attend(query, key, key)


def test_statistics_several_devices_and_float64_are_refused(monkeypatch):
    arrays = [normal(seed, 1, 32, 1, 4) for seed in range(3)]
    with pytest.raises(NotImplementedError, match="no statistics"):
        aj.attend_with_stats(*arrays, implementation="short")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="request in float64"):
        attend(*(np.asarray(x, np.float64) for x in arrays))
    monkeypatch.setattr(tiling, "on_one_cpu", lambda: False)
    with pytest.raises(NotImplementedError, match="single CPU device"):
        attend(*arrays)
