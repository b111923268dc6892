"""Any nesting of transformations gives the numbers it should, integers included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import dtypes

import attention_jax as aj
from attention_jax.testing import random_problem
from tests.engine.tools import close, normals

L, N = 8, 2


@pytest.fixture
def packed(rng):
    """Query, key, value, and traced-to-be integers and booleans: segments, positions, a mask."""
    q, k, v = normals(rng, (L, N, 3), (L, N, 3), (L, N, 4))
    ids = np.array([1, 1, 1, 2, 2, 2, 0, 0], np.int32)
    at = np.array([0, 1, 2, 0, 1, 2, 0, 0], np.int32)
    mask = rng.random((L, L)) < 0.8
    mask[:, 0] = True
    same = (ids[:, None] == ids[None, :]) & (ids != 0)[:, None]
    seen = same & (at[None, :] <= at[:, None]) & mask
    return (q, k, v), (ids, at, mask), seen


def call(attend, floats, others):
    q, k, v = floats
    ids, at, mask = others
    who = aj.masks.segments(ids, padding_id=0) & aj.masks.causal() & aj.masks.from_array(mask)
    return attend(q, k, v, mask=who, query_positions=at, key_positions=at)


def exact(floats, seen, d_out):
    from attention_jax.testing import reference_attention, reference_gradients

    out = reference_attention(*floats, mask=seen).out
    return out, reference_gradients(*floats, d_out, mask=seen)[:3]


def agree(got, expected):
    for x, y in zip(got, expected, strict=True):
        close(x, y, atol=5e-6)


def test_a24_integers_and_booleans_are_traced(attend, rng, packed):
    floats, others, seen = packed
    (d_out,) = normals(rng, (L, N, 4))
    out, gradients = exact(floats, seen, d_out)

    def loss(floats, others):
        return jnp.vdot(call(attend, floats, others), d_out)

    value, got = jax.jit(jax.value_and_grad(loss))(floats, others)
    close(value, (out * d_out).sum(), rtol=1e-4)
    agree(got, gradients)


def test_a24_integers_get_float0_from_vjp(attend, rng, packed):
    floats, others, seen = packed
    (d_out,) = normals(rng, (L, N, 4))

    def back(floats, others):
        _, pull = jax.vjp(lambda f, o: call(attend, f, o), floats, others)
        return pull(d_out)

    got, none = back(floats, others)
    agree(got, exact(floats, seen, d_out)[1])
    assert {x.dtype for x in none} == {dtypes.float0}
    allowed = jax.grad(lambda f, o: call(attend, f, o).sum(), argnums=(0, 1), allow_int=True)
    assert {x.dtype for x in allowed(floats, others)[1]} == {dtypes.float0}


def test_a24_ids_used_twice_and_in_a_scan(attend, rng, packed):
    floats, (ids, at, mask), seen = packed
    (d_out,) = normals(rng, (L, N, 4))

    def loss(floats, ids, at, mask):
        def step(total, scale):
            q, k, v = floats
            out = call(attend, (q, k, scale * v), (ids, at, mask))
            return total + jnp.vdot(out, d_out), ids.sum()

        return jax.lax.scan(step, 0.0, jnp.array([1.0, 2.0]))[0]

    got = jax.jit(jax.grad(loss))(floats, ids, at, mask)
    agree(got, [3 * g for g in exact(floats, seen, d_out)[1]])


WRAPPERS = {
    "remat": jax.checkpoint,
    "jit of remat": lambda f: jax.jit(jax.checkpoint(f)),
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "remat of remat": lambda f: jax.checkpoint(jax.checkpoint(f)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a25_remat_changes_nothing(attend, rng, packed, wrapper):
    """With dropout, so that a mask drawn anew in the backward pass would show."""
    floats, _, _ = packed
    (d_out,) = normals(rng, (L, N, 4))
    (bias,) = normals(rng, (N, 1, L))
    drop = {"dropout_rate": 0.3, "dropout_key": jax.random.key(2)}

    def f(floats, bias):
        q, k, v = floats
        return attend(q, k, v, bias=bias, mask=aj.masks.causal(), **drop)

    def back(f):
        return jax.jit(jax.grad(lambda *x: jnp.vdot(f(*x), d_out), argnums=(0, 1)))(floats, bias)

    for got, plain in zip(
        jax.tree.leaves(back(WRAPPERS[wrapper](f))), jax.tree.leaves(back(f)), strict=True
    ):
        np.testing.assert_allclose(got, plain, rtol=1e-6, atol=1e-6)


def test_a25_vmap_is_a_loop(attend, rng):
    """Over queries, masks, biases and score parameters, each on an axis of its own."""
    problem = random_problem(rng, score="general")
    q, k, v, w = problem.query, problem.key, problem.value, problem.params["weight"]
    ws = np.stack([w, 2 * w, -w])
    masks = rng.random((7, 11, 3)) < 0.7
    (biases,) = normals(rng, (11, 3))

    def f(w, mask, bias):
        return attend(q, k, v, score=aj.scores.general(w), mask=mask, bias=bias)

    together = jax.jit(jax.vmap(f, in_axes=(0, -1, -1)))(ws, masks, biases)
    for i in range(3):
        ref = type(problem)(q, k, v, masks[..., i], biases[:, i], "general", {"weight": ws[i]})
        close(together[i], ref.reference().out, atol=5e-6)


def test_a25_vmap_of_the_gradient_and_the_gradient_of_vmap(attend, rng):
    q, k, v = normals(rng, (3, 5, 2, 3), (6, 2, 3), (6, 2, 3))

    def loss(q, k):
        return jnp.sum(jnp.sin(attend(q, k, v, mask=aj.masks.causal())))

    each = jax.jit(jax.vmap(jax.grad(loss, argnums=1), in_axes=(0, None)))(q, k)
    whole = jax.jit(jax.grad(lambda k: jax.vmap(loss, in_axes=(0, None))(q, k).sum()))(k)
    close(each.sum(0), whole, atol=1e-5)


def test_a25_linearize_is_jvp(attend, rng):
    q, k, v, dq, dk, dv = normals(rng, *[(5, 2, 3)] * 6)

    def f(q, k, v):
        return attend(q, k, v, mask=aj.masks.window(2, 1))

    out, tangent = jax.jit(lambda x, dx: jax.jvp(f, x, dx))((q, k, v), (dq, dk, dv))
    linear_out, linear = jax.linearize(f, q, k, v)
    close(linear_out, out)
    close(linear(dq, dk, dv), tangent, atol=5e-6)
    doubled = jax.vmap(linear, in_axes=0)(*(np.stack([x, 2 * x]) for x in (dq, dk, dv)))
    close(doubled[1], 2 * np.asarray(tangent), atol=5e-6)


def test_a25_a_hessian_is_symmetric_and_the_same_on_every_path(attend, rng):
    q, k, v = normals(rng, (2, 1, 2), (3, 1, 2), (3, 1, 2))

    def loss(attend, x):
        q, k = x[:4].reshape(2, 1, 2), x[4:].reshape(3, 1, 2)
        return jnp.sum(attend(q, k, v) ** 2)

    x = np.concatenate([q.ravel(), k.ravel()])
    hessian = np.asarray(jax.jit(jax.hessian(lambda x: loss(attend, x)))(x))
    close(hessian, hessian.T, atol=5e-6)
    dense = jax.jit(jax.hessian(lambda x: loss(aj.attend, x)))(x)
    close(hessian, dense, atol=5e-6)


def test_a25_attend_is_traced_once_for_equal_requests(attend, rng):
    """Equal masks and scores are equal as static data: nothing compiles a second time."""
    q, k, v = normals(rng, (5, 2, 3), (6, 2, 3), (6, 2, 3))
    traces = []

    @jax.jit
    def f(q, k, v, mask, score):
        traces.append(1)
        return attend(q, k, v, mask=mask, score=score)

    for _ in range(2):
        mask = aj.masks.causal() & aj.masks.window(2, 0)
        score = aj.scores.soft_cap(aj.scores.scaled_dot(), 5.0)
        f(q, k, v, mask, score)
    assert len(traces) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["lengths", "masks", "additive"])
def test_a25_the_gradient_of_vmap_where_each_entry_branches_otherwise(blocked, rng, what):
    """Blocks that one entry skips and another visits; hidden features in range or out of it."""
    problem = random_problem(rng, score="additive")
    queries = np.stack([problem.query, 30 * problem.query, problem.query])
    each = {
        "lengths": np.array([3, 7, 11], np.int32),
        "masks": rng.random((3, 7, 11)) < 0.6,
        "additive": np.zeros(3, np.int32),
    }[what]
    request = {"implementation": blocked, "block_size": (4, 5)}

    def one(query, x, **how):
        if what == "additive":
            how["score"] = aj.scores.additive(**problem.params)
        else:
            how["mask"] = aj.masks.padding(x) if what == "lengths" else x
        return jnp.sum(jnp.sin(aj.attend(query, problem.key, problem.value, **how)))

    def together(queries):
        return jax.vmap(lambda q, x: one(q, x, **request))(queries, each).sum()

    got = jax.jit(jax.grad(together))(queries)
    alone = jax.jit(jax.grad(lambda q, x: one(q, x, implementation="dense")))
    for i in range(3):
        close(got[i], alone(queries[i], each[i]), rtol=1e-4, atol=1e-5)
