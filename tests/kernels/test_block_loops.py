"""Loops over blocks cover exactly the visible pairs, also if a few rows attend to all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels.block_order import in_columns, in_parts
from attention_jax.masks.block_map import SKIPPED


def steps(mask):
    kinds = np.asarray(mask.block_map(4096, 4096, 64).kinds)
    groups = in_columns(kinds)
    rows = np.concatenate([rows for rows, *_ in groups])
    assert sorted(rows) == list(range(64))
    for some, columns, own in groups:
        for row, visited, kind in zip(some, columns, own, strict=True):
            seen = {int(j): int(k) for j, k in zip(visited, kind, strict=True) if k != SKIPPED}
            assert seen == {int(j): int(kinds[row, j]) for j in np.nonzero(kinds[row])[0]}
    return len(groups), sum(columns.size for _, columns, _ in groups), int((kinds != 0).sum())


def test_a_few_rows_that_see_everything_stand_apart():
    near = aj.masks.window(100, 100)
    assert steps(near)[0] == 1
    groups, taken, visited = steps(near | aj.masks.global_tokens(np.array([0, 2000])))
    assert groups == 2
    assert taken <= 1.3 * visited


def test_half_a_plane_is_one_walk():
    assert steps(aj.masks.causal())[0] == 1


def test_parts_take_every_pair_once_and_those_to_visit_first():
    ids = np.sort(np.random.default_rng(0).integers(0, 5, (1, 300)))
    kinds = np.asarray(aj.masks.segments(ids).block_map(300, 300, 16).kinds).reshape(19, 19)
    i, j = (jnp.asarray(x.ravel()) for x in np.indices(kinds.shape))
    kind, i, j = (np.asarray(x).ravel() for x in in_parts(jnp.asarray(kinds.ravel()), i, j))
    visited = (kinds != SKIPPED).sum()
    assert (kind[:visited] != SKIPPED).all()
    assert not kind[visited:].any()
    taken = sorted(zip(i[:visited], j[:visited], strict=True))
    assert taken == sorted(zip(*np.nonzero(kinds), strict=True))


def test_kinds_known_only_at_run_time_in_many_blocks():
    ids = np.array([[3] * 40 + [1] * 37 + [7] * 23, [2] * 100])
    query, key, value, d_out = jax.random.normal(jax.random.key(0), (4, 2, 100, 2, 8))

    def out_and_gradients(ids, **options):
        mask = aj.masks.segments(ids) & aj.masks.causal()
        out, pull = jax.vjp(lambda *x: aj.attend(*x, mask=mask, **options), query, key, value)
        return (out, *pull(d_out))

    expected = out_and_gradients(ids, implementation="dense")
    got = jax.jit(lambda ids: out_and_gradients(ids, implementation="flash", block_size=(10, 9)))
    for a, b in zip(got(ids), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.thorough
def test_second_derivatives_inside_a_loop_where_jax_forgets_the_rule():
    ids = jnp.array([[0] * 20 + [1] * 30])
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 50, 1, 4))

    def slope(query, implementation):
        def step(x, _):
            options = {"implementation": implementation}
            options |= {"block_size": (5, 4)} if implementation == "flash" else {}
            return aj.attend(x, key, value, mask=aj.masks.segments(ids), **options), None

        def loss(query):
            return jnp.sum(jnp.sin(jax.lax.scan(step, query, length=2)[0]))

        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)))(query)

    np.testing.assert_allclose(slope(query, "flash"), slope(query, "dense"), atol=1e-5)
