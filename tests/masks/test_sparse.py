"""Sparse patterns: definitions, exact block maps, and kernels against the reference."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import masks
from attention_jax.testing import reference_attention, reference_gradients

KEY = jax.random.key(0)
GRID = (3, 4, 2)


def chosen(mask, length, size):
    """The key blocks visible to each query block, from a mask of single positions."""
    at = np.arange(0, length, size)
    rows = -(-length // size)
    return np.asarray(mask.to_array(rows, rows, query_positions=at, key_positions=at))


def random_oracle(mask, length, size):
    picked = chosen(mask, length, size)

    def allowed(t, s):
        inside = t < len(picked[..., 0]) * size if picked.ndim == 2 else t < length
        row, column = np.minimum(t // size, picked.shape[-2] - 1), s // size
        return picked[..., row, np.minimum(column, picked.shape[-1] - 1)] & inside & (s < length)

    return allowed


def axial_oracle(axis):
    def allowed(t, s):
        a, b = (np.unravel_index(x % 24, GRID) for x in (t, s))
        same = t // 24 == s // 24
        for i in range(3):
            same = same & ((a[i] == b[i]) | (i == axis))
        return same

    return allowed


RANDOM = masks.random(KEY, 24, 4, 2)
CASES = {
    "strided": (masks.strided(3), lambda t, s: (t - s) % 3 == 0),
    "strided 1": (masks.strided(1), lambda t, s: t == t),
    "dilated": (masks.dilated(5, 3), lambda t, s: np.isin(s - t, [-6, -3, 0, 3, 6])),
    "dilated 1": (masks.dilated(4, 1), lambda t, s: abs(s - t) <= 2),
    "summary": (masks.summary_tokens(5, 2), lambda t, s: (s % 5 >= 3) & (t == t)),
    "global": (masks.global_tokens(2), lambda t, s: (t < 2) | (s < 2)),
    "global list": (
        masks.global_tokens([9, 4, 5]),
        lambda t, s: np.isin(t, [4, 5, 9]) | np.isin(s, [4, 5, 9]),
    ),
    "no global": (masks.global_tokens(0), lambda t, s: t < 0),
    "block_local": (masks.block_local(4, 3), lambda t, s: abs(t // 4 - s // 4) <= 1),
    "axial 0": (masks.axial(GRID, 0), axial_oracle(0)),
    "axial 1": (masks.axial(GRID, 1), axial_oracle(1)),
    "axial -1": (masks.axial(GRID, -1), axial_oracle(2)),
    "random": (RANDOM, random_oracle(RANDOM, 24, 4)),
    "longformer": (
        masks.longformer(5, [0, 7], 2),
        lambda t, s: np.isin(s - t, [-4, -2, 0, 2, 4]) | np.isin(t, [0, 7]) | np.isin(s, [0, 7]),
    ),
    "sparse_strided": (
        masks.sparse_strided(4),
        lambda t, s: (s <= t) & ((t - s <= 4) | ((t - s) % 4 == 0)),
    ),
    "sparse_fixed": (
        masks.sparse_fixed(4, 2),
        lambda t, s: (s <= t) & ((t // 4 == s // 4) | (s % 4 >= 2)),
    ),
    "bigbird": (
        masks.bigbird(KEY, 24, 4, local_blocks=3, global_blocks=1, random_blocks=2),
        lambda t, s: (
            (abs(t // 4 - s // 4) <= 1) | (t < 4) | (s < 4) | random_oracle(RANDOM, 24, 4)(t, s)
        ),
    ),
}
EXACT = set(CASES) - {"longformer", "sparse_strided", "sparse_fixed", "bigbird"}


@pytest.mark.parametrize("name", CASES)
def test_a_pattern_equals_its_definition(name):
    mask, oracle = CASES[name]
    for T, S in ((24, 24), (7, 23), (31, 5)):
        t, s = np.arange(T)[:, None], np.arange(S)
        got = mask.to_array(T, S)
        assert got.shape == (T, S)
        np.testing.assert_array_equal(got, np.broadcast_to(oracle(t, s), (T, S)))
        assert mask.density(T, S) == pytest.approx(np.mean(got))
    # explicit positions, per item, in any order
    q_at = np.array([[5, 0, 0, 17, 3], [9, 8, 23, 22, 21]])
    k_at = np.array([[1, 2, 4, 20, 7, 9], [6, 5, 4, 4, 0, 23]])
    got = mask.to_array(5, 6, query_positions=q_at, key_positions=k_at)
    want = oracle(q_at[:, :, None], k_at[:, None, :])
    np.testing.assert_array_equal(got[:, 0], np.broadcast_to(want, (2, 5, 6)))


@pytest.mark.parametrize("name", CASES)
def test_block_maps_are_sound_and_exact(name):
    mask, _ = CASES[name]
    for T, S, size in ((24, 24, 4), (23, 24, (3, 5)), (24, 31, (7, 2)), (5, 24, 1), (24, 24, 8)):
        size_q, size_k = size if isinstance(size, tuple) else (size, size)
        plane = np.asarray(mask.to_array(T, S))
        kinds = mask.block_map(T, S, size).kinds
        assert isinstance(kinds, np.ndarray), "static: known at trace time"
        for i, j in np.ndindex(kinds.shape):
            block = plane[i * size_q : (i + 1) * size_q, j * size_k : (j + 1) * size_k]
            if name in EXACT:
                assert kinds[i, j] == (2 if block.all() else int(block.any())), (i, j, size)
            else:
                assert kinds[i, j] or not block.any()
                assert kinds[i, j] < 2 or block.all()
    # unsorted positions: the map is still sound, and equal when they are traced
    at = np.random.default_rng(0).permutation(24)

    def kinds_at(at):
        return jnp.asarray(
            mask.block_map(24, 24, (5, 4), query_positions=at, key_positions=at).kinds
        )

    kinds = np.asarray(kinds_at(at))
    plane = np.asarray(mask.to_array(24, 24, query_positions=at, key_positions=at))
    for i, j in np.ndindex(kinds.shape):
        block = plane[i * 5 : i * 5 + 5, j * 4 : j * 4 + 4]
        assert kinds[i, j] or not block.any()
        assert kinds[i, j] < 2 or block.all()
    np.testing.assert_array_equal(jax.jit(kinds_at)(at), kinds)


def test_published_patterns_skip_empty_blocks():
    nearby = masks.bigbird(KEY, 4096, 64)
    kinds = nearby.block_map(4096, 4096, 64).kinds
    assert set(np.unique(kinds)) == {0, 2}
    assert (kinds[2:] > 0).sum(axis=1).max() <= 3 + 2 + 3
    assert (kinds[:2] == 2).all()
    assert masks.longformer(256, 1).block_map(4096, 4096, 128).density < 0.16


def test_random_blocks_depend_on_key_head_and_position():
    mask = masks.random(KEY, 100, 10, 3, num_heads=4)
    plane = np.asarray(mask.to_array(100, 100))
    assert plane.shape == (4, 100, 100)
    picked = plane[:, ::10, ::10]
    np.testing.assert_array_equal(plane, picked.repeat(10, 1).repeat(10, 2))
    np.testing.assert_array_equal(picked.sum(-1), 3)
    assert len({head.tobytes() for head in picked}) == 4
    other = masks.random(jax.random.fold_in(KEY, 1), 100, 10, 3, num_heads=4)
    assert (np.asarray(other.to_array(100, 100)) != plane).any()
    # a single row, as in cached decoding, equals the row of the full mask
    row = mask.to_array(1, 100, query_positions=np.array([37]))
    np.testing.assert_array_equal(row[:, 0], plane[:, 37])
    # the choice is uniform over blocks; with few blocks all are chosen
    many = np.asarray(
        masks.random(KEY, 700, 7, 2, num_heads=50).to_array(
            100, 700, query_positions=np.arange(0, 700, 7)
        )
    )
    counts = many[:, :, ::7].sum((0, 1))
    assert counts.sum() == 50 * 100 * 2
    assert 50 < counts.min() < counts.max() < 160
    assert masks.random(KEY, 20, 10, 5).to_array(20, 20).all()
    # a traced key gives the same choice, and so does a concrete key inside jit
    traced = jax.jit(lambda key: masks.random(key, 100, 10, 3, num_heads=4).to_array(100, 100))
    np.testing.assert_array_equal(traced(KEY), plane)
    np.testing.assert_array_equal(jax.jit(lambda: mask.to_array(100, 100))(), plane)
    raw = masks.random(jax.random.key_data(KEY), 100, 10, 3, num_heads=4)
    assert raw == mask
    kinds = mask.block_map(100, 100, 20).kinds
    assert kinds.shape == (4, 5, 5)
    assert isinstance(kinds, np.ndarray)
    blocks = picked.reshape(4, 5, 2, 5, 2)
    want = np.where(blocks.all((2, 4)), 2, blocks.any((2, 4)))
    np.testing.assert_array_equal(kinds, want)
    jitted = jax.jit(lambda key: masks.random(key, 100, 10, 3, 4).block_map(100, 100, 20).kinds)
    np.testing.assert_array_equal(jitted(KEY), want)


PATHS = {
    "dense": {"implementation": "dense"},
    "blockwise": {"implementation": "blockwise", "block_size": (4, 6)},
    "flash": {"implementation": "flash", "block_size": (4, 6)},
}
ENGINE = {
    "bigbird": masks.bigbird(
        KEY, 24, 4, local_blocks=1, global_blocks=1, random_blocks=1, num_heads=4
    )
    & masks.padding(np.array([24, 13])),
    "axial": masks.axial(GRID, 1),
}


# All kernels for the mask with one block map per head; flash alone for the other.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] if n == "bigbird" else []) for n in ENGINE],
)
def test_every_kernel_agrees_with_the_reference(name):
    rng = np.random.default_rng(1)
    q, k, v, d_out = (
        rng.normal(size=(2, n, h, d)).astype(np.float32)
        for n, h, d in ((23, 4, 5), (24, 2, 5), (24, 2, 3), (23, 4, 3))
    )
    mask = ENGINE[name]
    plane = np.asarray(mask.to_array(23, 24))
    want = reference_attention(q, k, v, mask=plane)
    exact = reference_gradients(q, k, v, d_out, mask=plane)
    for path in PATHS.values() if name == "bigbird" else [PATHS["flash"]]:

        @jax.jit
        def both(q, k, v, path=path):
            def run(*x):
                out, stats = aj.attend_with_stats(*x, mask=mask, **path)
                return out, stats.lse

            out, pull, lse = jax.vjp(run, q, k, v, has_aux=True)
            return out, lse, pull(jnp.asarray(d_out))

        out, lse, gradients = both(q, k, v)
        np.testing.assert_allclose(out, want.out, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse, want.lse, rtol=2e-5, atol=2e-5)
        for got, right in zip(gradients, exact[:3], strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_rows_with_every_block_among_rows_with_few_blocks():
    rng = np.random.default_rng(2)
    q, k, v, d_out = rng.normal(size=(4, 67, 1, 4)).astype(np.float32)
    mask = masks.longformer(6, [0, 40]) | masks.random(KEY, 67, 4, 1)
    visits = (mask.block_map(67, 67, 4).kinds > 0).sum(axis=1)
    assert visits.max() == 17
    assert np.median(visits) <= 7
    plane = np.asarray(mask.to_array(67, 67))

    @jax.jit
    def both(q, k, v):
        out, pull = jax.vjp(
            lambda *x: aj.attend(*x, mask=mask, implementation="flash", block_size=4), q, k, v
        )
        return out, pull(jnp.asarray(d_out))

    out, gradients = both(q, k, v)
    want = reference_attention(q, k, v, mask=plane).out
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    for got, right in zip(
        gradients, reference_gradients(q, k, v, d_out, mask=plane)[:3], strict=True
    ):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=2e-5)


def test_a09_window_sizes():
    for size in (1, 2, 6, 9):
        counts = np.asarray((masks.causal() & masks.window(size - 1, 0)).to_array(6, 6)).sum(1)
        assert counts.tolist() == [min(size, t + 1) for t in range(6)]
        counts = np.asarray((masks.causal() & masks.window(size, 0)).to_array(6, 6)).sum(1)
        assert counts.tolist() == [min(size + 1, t + 1) for t in range(6)]
    symmetric = np.asarray(masks.window(3, 3).to_array(6, 6))
    assert symmetric.sum(1).tolist() == [4, 5, 6, 6, 5, 4]
    # window_size // 2 on each side, odd or even; dilation 1 is the same
    for size in (6, 7):
        np.testing.assert_array_equal(masks.local(size).to_array(6, 6), symmetric)
        np.testing.assert_array_equal(masks.dilated(size, 1).to_array(6, 6), symmetric)


def test_a_million_positions():
    for mask in (
        masks.dilated(256, 2),
        masks.longformer(512, [0, 10_000, 999_999]),
        masks.bigbird(KEY, 1_000_000, 64),
        masks.sparse_fixed(1024),
        masks.axial((1000, 1000), 0),
    ):
        mask.block_map(1000, 1000, 100)
        started = time.perf_counter()
        found = mask.block_map(1_000_000, 1_000_000, 512)
        assert time.perf_counter() - started < 4  # a few hundredths on a quiet machine
        assert found.kinds.shape == (1954, 1954)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.strided(0), ValueError, "stride must be at least 1"),
        (lambda: masks.dilated(3, 0), ValueError, "dilation must be at least 1"),
        (lambda: masks.summary_tokens(3, 4), ValueError, "count 4 and size 3"),
        (lambda: masks.global_tokens([-1]), ValueError, "at least 0, got -1"),
        (lambda: masks.global_tokens([1.5]), TypeError, "tokens must be integers"),
        (lambda: masks.global_tokens([[1]]), ValueError, "list of ints"),
        (lambda: jax.jit(lambda x: masks.global_tokens(x).to_array(2, 2))(jnp.array([1])),
         TypeError, "known at trace time"),
        (lambda: masks.axial((2, 3), 2), ValueError, r"axis 2 is out of range .* \[2, 3\]"),
        (lambda: masks.axial((2, 0), 0), ValueError, "shape must be at least 1"),
        (lambda: masks.random(0, 8, 2), TypeError, "key must be one PRNG key"),
        (lambda: masks.random(jax.random.split(KEY), 8, 2), ValueError, "one PRNG key"),
        (lambda: masks.random(KEY, 8, 2, 0), ValueError, "blocks must be at least 1"),
    ],
)  # fmt: skip
def test_pattern_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_repr_is_the_call():
    assert repr(masks.longformer(4, 2, 3)) == "dilated(4, 3) | global_tokens(2)"
    assert repr(masks.global_tokens([5, 3])) == "global_tokens([3, 5])"
    assert repr(masks.sparse_strided(8)) == "causal() & (window(8, 0) | strided(8))"
    assert repr(masks.axial((2, 3), -1)) == "axial((2, 3), 1)"
    assert repr(masks.block_local(2, 3)) == "block_local(2, 3)"
    assert repr(masks.summary_tokens(4)) == "summary_tokens(4, 1)"
