"""Axial attention against the axial mask; Shaw attention against the paper's sum."""

import jax
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import masks, positions
from attention_jax.testing import reference_attention

GRID, CELLS = (2, 5, 3), 30


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def test_reshaping_equals_the_axial_mask():
    query, key, value = arrays((2, CELLS, 4, 6), (2, CELLS, 2, 6), (2, CELLS, 2, 3))
    lengths = np.array([CELLS, 17])
    key[1, 17:] = np.nan  # padding
    keys = np.arange(CELLS) < lengths[:, None]
    rows = (np.arange(CELLS) % 4 > 0)[:, None]
    for axis, mask, bias, hides in (
        (0, masks.causal() & masks.padding(lengths), positions.alibi(4), True),
        (-1, masks.segments(np.repeat([3, 1, 2], 10)), None, False),
        (1, keys[:, None, None, :], None, True),
        (2, rows, positions.relative_bias(arrays((4, 8))[0], max_distance=9), False),
    ):
        given = key if hides else np.nan_to_num(key)

        def lines(q, k, v, axis=axis, mask=mask, bias=bias):
            return aj.axial_attention(q, k, v, GRID, axis, mask=mask, bias=bias)

        def masked(q, k, v, axis=axis, mask=mask, bias=bias):
            other = masks.from_array(mask) if isinstance(mask, np.ndarray) else mask
            both = masks.axial(GRID, axis) if mask is None else masks.axial(GRID, axis) & other
            return aj.attend(q, k, v, mask=both, bias=bias, implementation="dense")

        def both(*x, lines=lines, masked=masked):
            found = []
            for f in (lines, masked):
                out, pull = jax.vjp(f, *x)
                found.append(
                    (out, pull(np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)))
                )
            return found

        got, want = jax.jit(both)(query, given, value)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_grid_without_batch_axes_and_an_empty_batch():
    query, key, value = arrays((CELLS, 1, 4), (CELLS, 1, 4), (CELLS, 1, 2))
    got = aj.axial_attention(query, key, value, (CELLS,), 0)
    np.testing.assert_allclose(got, aj.attend(query, key, value), rtol=1e-5, atol=1e-6)
    empty = (x[None][:0] for x in (query, key, value))
    assert aj.axial_attention(*empty, GRID, 1).shape == (0, CELLS, 1, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shape": (2, 5)}, ValueError, r"grid of shape \[2, 5\] has 10 cells, but T = 30"),
        ({"axis": 3}, ValueError, "axis 3"),
        ({"mask": np.ones((CELLS, CELLS), bool)}, ValueError, "entry for each pair"),
        ({"mask": np.ones(CELLS)}, TypeError, "bias"),
        ({"bias": np.ones((CELLS, CELLS), np.float32)}, TypeError, "bias object"),
        ({"mask": masks.padding(np.array([1, 2, 3]))}, ValueError, "does not broadcast"),
    ],
)
def test_axial_mistakes(change, error, message):
    query, key, value = arrays(*[(2, CELLS, 1, 4)] * 3)
    with pytest.raises(error, match=message):
        aj.axial_attention(query, key, value, **({"shape": GRID, "axis": 0} | change))


def shaw_oracle(query, key, value, key_table, value_table, distance, mask):
    a, b = (np.asarray(x, np.float64) for x in (key_table, value_table))
    at = len(a) // 2 + np.clip(distance, -(len(a) // 2), len(a) // 2)
    bias = np.einsum("...tnh,...tsh->...nts", query, a[at]) / np.sqrt(query.shape[-1])
    found = reference_attention(query, key, value, bias=bias, mask=mask)
    at = len(b) // 2 + np.clip(distance, -(len(b) // 2), len(b) // 2)
    return found.out + np.einsum("...nts,...tsv->...tnv", found.weights, b[at])


def test_shaw_attention_equals_the_paper():
    T, S = 7, 11
    query, key, value, a, b, c = arrays(
        (2, T, 4, 5), (2, S, 2, 5), (2, S, 2, 3), (7, 5), (5, 3), (1, 3)
    )
    q_at = np.array([np.arange(T), [9, 3, 3, -9, 2, 20, 7]])
    k_at = np.array([np.arange(S), [0, 1, 2, 2, 9, 8, 30, 7, 6, 5, 4]])
    distance = k_at[:, None, :] - q_at[:, :, None]
    keys = np.arange(S) < np.array([S, 6])[:, None]
    seen = (distance <= 3) & keys[:, None, :]
    assert not seen.any(-1).all()  # one row is empty
    for table, mask, plane in (
        (b, masks.window(None, 3) & masks.padding(np.array([S, 6])), seen[:, None]),
        (c, None, None),
    ):
        with_nan = value.copy()
        if mask is not None:
            with_nan[1, 6:] = np.nan

        def run(value, table, mask=mask):
            return aj.shaw_attention(
                query, key, value, a, table, mask=mask, query_positions=q_at, key_positions=k_at
            )

        def both(value, table, run=run):
            out, pull = jax.vjp(run, value, table)
            return out, pull(out)

        out, (d_value, d_table) = jax.jit(both)(with_nan, table)
        want = shaw_oracle(query, key, value, a, table, distance, plane)
        np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
        assert np.isfinite(d_value).all()
        step = np.random.default_rng(1).normal(size=table.shape)
        more = shaw_oracle(query, key, value, a, table + step, distance, plane) - want
        np.testing.assert_allclose((d_table * step).sum(), (want * more).sum(), rtol=1e-3)


def test_shaw_attention_mistakes_and_low_precision():
    x = arrays((3, 2, 4))[0]
    with pytest.raises(ValueError, match="odd number of rows"):
        aj.shaw_attention(x, x, x, x[:3, 0], x[:2, 0])
    with pytest.raises(ValueError, match="value_table has shape"):
        aj.shaw_attention(x, x, x[..., :3], x[:3, 0], x[:3, 0])
    low = jax.ShapeDtypeStruct((3, 2, 4), jax.numpy.bfloat16)
    out = jax.eval_shape(lambda x, table: aj.shaw_attention(x, x, x, table, table), low, x[:3, 0])
    assert out.dtype == low.dtype
