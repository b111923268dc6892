"""The walk visits what the mask leaves, also where a few rows see everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.kernels.visits import by_row, in_columns, in_parts
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


@pytest.mark.parametrize("traced", [False, True])
def test_a_row_s_full_blocks_come_first_and_its_visits_end(traced):
    kinds = np.asarray((aj.masks.causal() & aj.masks.window(100, 0)).block_map(640, 640, 64).kinds)
    columns, full, visited = by_row(jnp.asarray(kinds) if traced else kinds)
    for row, order, a, b in zip(kinds, np.asarray(columns), full, visited, strict=True):
        assert set(order[:a]) == set(np.nonzero(row == 2)[0])
        assert set(order[a:b]) == set(np.nonzero(row == 1)[0])


def test_a_sweep_in_parts_takes_every_pair_once():
    ids = np.sort(np.random.default_rng(0).integers(0, 5, (1, 300)))
    kinds = jnp.asarray(aj.masks.segments(ids).block_map(300, 300, 16).kinds).reshape(19, 19)
    i, j, kind = (np.asarray(x) for x in in_parts(kinds))
    assert i.shape[0] == 8
    visited = kind.ravel() != SKIPPED
    assert visited[: visited.sum()].all()
    taken = sorted(zip(i.ravel()[visited], j.ravel()[visited], strict=True))
    assert taken == sorted(zip(*np.nonzero(np.asarray(kinds)), strict=True))


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
