"""Gradients of low-precision arrays that many examples or heads share are added in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj

COPIES, T, N, H = 512, 16, 2, 8
LOW = jnp.bfloat16


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# name: the shared array, and the request's arguments made of it
SHARED = {
    "bias": (normal(1, T, T), lambda x: {"bias": x}),
    "bias of each head": (normal(2, N, T, T), lambda x: {"bias": x}),
    "relative_bias": (normal(3, N, 8), lambda x: {"bias": aj.positions.relative_bias(x)}),
    "shaw": (normal(4, 7, H), lambda x: {"bias": aj.positions.shaw(x)}),
    "temperature": (
        jnp.float32(1.5),
        lambda x: {"score": aj.scores.temperature(aj.scores.scaled_dot(), x)},
    ),
    "general": (normal(5, H, H) / 4, lambda x: {"score": aj.scores.general(x)}),
    "additive": (normal(6, H, 4), lambda x: {"score": aj.scores.additive(x, x, x[0])}),
    "custom": (
        normal(7, T, T),
        lambda x: {
            "score": aj.scores.custom(lambda q, k, i, j: q @ k.T + x[i][:, j].astype(q.dtype))
        },
    ),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_equal_examples_give_as_many_times_the_gradient_of_one(name, implementation):
    shared, arguments = SHARED[name]
    query, key, value = (normal(seed, 1, T, N, H) for seed in range(8, 11))

    def gradient(copies, shared):
        def loss(shared):
            arrays = (jnp.tile(x, (copies, 1, 1, 1)) for x in (query, key, value))
            block_size = None if implementation == "dense" else 8
            options = {"implementation": implementation, "block_size": block_size}
            out = aj.attend(*arrays, **arguments(shared), **options)
            return jnp.sum(out[..., 0])

        return jax.jit(jax.grad(loss))(shared)

    shared = shared.astype(LOW)
    got = np.asarray(gradient(COPIES, shared), np.float64) / COPIES
    wanted = np.asarray(gradient(1, shared.astype(jnp.float32)), np.float64)
    assert np.abs(got - wanted).max() <= 0.01 * np.abs(wanted).max()


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_keys_and_values_of_many_query_heads(implementation):
    heads = 256
    query = jnp.tile(normal(0, 1, T, 1, H), (1, 1, heads, 1))
    key, value = normal(1, 1, T, 1, H).astype(LOW), normal(2, 1, T, 1, H).astype(LOW)

    def gradients(query, key, value):
        def loss(key, value):
            return aj.attend(query, key, value, implementation=implementation)[..., 0].sum()

        return jax.jit(jax.grad(loss, (0, 1)))(key, value)

    got = gradients(query, key, value)
    wanted = gradients(query[:, :, :1], key.astype(jnp.float32), value.astype(jnp.float32))
    for a, b in zip(got, wanted, strict=True):
        a, b = np.asarray(a, np.float64) / heads, np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()


def relative_error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(got - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("implementation", ["blockwise", "flash"])
def test_parameters_are_not_rounded_example_by_example(implementation):
    query, key, value = (normal(seed, 1, T, N, H) for seed in range(8, 11))
    seen = normal(11, 1, T, N, H)

    def gradient(copies, tau):
        def loss(tau):
            arrays = (jnp.tile(x, (copies, 1, 1, 1)) for x in (query, key, value))
            score = aj.scores.temperature(aj.scores.scaled_dot(), tau)
            out = aj.attend(*arrays, score=score, implementation=implementation, block_size=7)
            return jnp.sum(out * seen)

        return jax.grad(loss)(tau)

    tau = jnp.asarray([0.7, 1.9], LOW)
    got = np.asarray(gradient(COPIES, tau), np.float64) / COPIES
    assert relative_error(got, gradient(1, tau.astype(jnp.float32))) <= 0.005


def test_divergences_of_many_student_heads():
    heads, students = 256, 2
    query, key = normal(0, T, 1, H).astype(LOW), normal(1, T, 1, H).astype(LOW)
    own = [normal(seed, T, students, H) for seed in (2, 3)]

    def gradients(repeats, query, key):
        def loss(query, key):
            student = [jnp.tile(x, (1, repeats, 1)) for x in own]
            options = {"teacher_gradient": True, "block_size": 7}
            rows = aj.distillation.attention_divergence((query, key), student, **options)
            return jnp.sum(rows)

        return jax.grad(loss, (0, 1))(query, key)

    got = gradients(heads // students, query, key)
    wanted = gradients(1, query.astype(jnp.float32), key.astype(jnp.float32))
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(np.asarray(a, np.float64) / (heads // students), b) <= 0.01


def test_divergences_over_many_blocks():
    length = 256
    query, key = (normal(seed, length, 1, H).astype(LOW) for seed in (0, 1))
    own = [normal(seed, length, 1, H) for seed in (2, 3)]

    def gradients(query, key):
        def loss(query, key):
            options = {"teacher_gradient": True, "block_size": 2}
            return jnp.sum(aj.distillation.attention_divergence((query, key), own, **options))

        return jax.jit(jax.grad(loss, (0, 1)))(query, key)

    got = gradients(query, key)
    wanted = gradients(query.astype(jnp.float32), key.astype(jnp.float32))
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) <= 0.005


def test_rows_of_a_learned_table():
    table, positions = normal(0, 4, H).astype(LOW), np.tile(np.arange(4), (1024, 1))
    weight = normal(1, 4, H).astype(LOW)

    def rows(table):
        out = aj.positions.learned(table, positions)
        return jnp.sum((out * weight[None]).astype(jnp.float32))

    assert relative_error(jax.grad(rows)(table), 1024 * weight.astype(jnp.float32)) <= 0.01
