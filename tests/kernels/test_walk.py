"""The walk visits what the mask leaves, also where a few rows see everything."""

import numpy as np

import attention_jax as aj
from attention_jax.kernels.walk import _groups, _visits
from attention_jax.masks.block_map import SKIPPED


def steps(mask):
    kinds = np.asarray(mask.block_map(4096, 4096, 64).kinds)
    groups = _groups(*_visits(kinds))
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
