"""The cache by itself: attention over it is attention over what was appended, and no more."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.cache import KVCache

B, T, N, K, H, V, LENGTH = 3, 7, 4, 2, 4, 5, 9
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    jnp.asarray(RNG.normal(size=(B, T, heads, depth)), jnp.float32)
    for heads, depth in ((N, H), (K, H), (K, V))
)
CAUSAL = aj.masks.causal()


def _empty(batch=B, length=LENGTH, **options):
    return KVCache.init(batch, length, K, H, value_depth=V, **options)


def _poisoned(cache):
    """The same cache with NaN in every slot."""
    nan = jnp.nan
    return jax.tree.map(lambda x: jnp.full_like(x, nan) if x.dtype == jnp.float32 else x, cache)


@jax.jit
def _look(query, cache, positions, mask=CAUSAL):
    return aj.attend(
        query,
        cache.key,
        cache.value,
        mask=cache.mask() & mask,
        query_positions=positions,
        key_positions=cache.positions(),
    )


@jax.jit
def _step(cache, query, key, value, valid=None):
    positions = cache.next_positions(query.shape[1], valid)
    cache = cache.append(key, value, valid)
    return _look(query, cache, positions), cache


FULL = np.asarray(aj.attend(QUERY, KEY, VALUE, mask=CAUSAL))


@pytest.mark.parametrize("chunks", [(1,) * T, (3, 1, 3)], ids=str)
def test_step_t_is_row_t_of_the_full_pass_whatever_stands_in_unwritten_slots(chunks):
    cache, outs, start = _poisoned(_empty()), [], 0
    for size in chunks:
        part = slice(start, start + size)
        out, cache = _step(cache, QUERY[:, part], KEY[:, part], VALUE[:, part])
        outs.append(out)
        start += size
        assert int(cache.index) == start
    np.testing.assert_allclose(jnp.concatenate(outs, 1), FULL, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cache.key[:, :T], KEY)
    np.testing.assert_array_equal(cache.positions()[0], np.arange(LENGTH))
    np.testing.assert_array_equal(cache.mask().to_array(1, LENGTH)[0, 0, 0], np.arange(9) < T)


def test_the_buffers_are_donated():
    cache = _empty()
    append = jax.jit(KVCache.append, donate_argnums=0)
    new = append(cache, KEY[:, :1], VALUE[:, :1])
    assert cache.key.is_deleted()
    assert int(new.index) == 1


def test_overflow_is_an_error_where_the_index_is_known():
    cache = _empty().append(KEY, VALUE)
    with pytest.raises(ValueError, match=r"3 more.*room for 9.*holds 7"):
        cache.append(KEY[:, :3], VALUE[:, :3])
    with pytest.raises(ValueError, match=r"7 more.*room for 6"):
        jax.jit(KVCache.append)(_empty(length=6), KEY, VALUE)


def test_overflow_under_tracing_drops_the_write_and_is_loud():
    cache = _empty().append(KEY, VALUE)
    part = slice(0, 3)
    out, after = _step(cache, QUERY[:, part], KEY[:, part], VALUE[:, part])
    assert bool(jnp.isnan(out).all())
    for name in ("key", "value", "index", "token_positions", "lengths"):
        np.testing.assert_array_equal(getattr(after, name), getattr(cache, name))
    # What would fit again does not hide that something is missing.
    out, after = _step(after, QUERY[:, :1], KEY[:, :1], VALUE[:, :1])
    assert bool(jnp.isnan(out).all())
    for implementation in ("blockwise", "dense"):
        out = aj.attend(
            QUERY, after.key, after.value, mask=after.mask(), implementation=implementation
        )
        assert bool(jnp.isnan(out).all()), implementation


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_gives_what_the_prompt_alone_gives(side):
    """Each example keeps its own positions; padding, NaN or not, is seen by nobody."""
    lengths = np.array([4, 2, 0])
    at = np.arange(4)
    valid = (at >= 4 - lengths[:, None]) if side == "left" else (at < lengths[:, None])
    place = np.where(valid, np.cumsum(valid, 1) - valid, 0)
    rows = np.arange(B)[:, None]
    bare = [np.asarray(x)[rows, place] for x in (QUERY, KEY, VALUE)]
    query, key, value = (np.where(valid[..., None, None], x, np.nan) for x in bare)
    out, cache = _step(_empty(), jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), valid)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(out[b, valid[b]], FULL[b, :n], rtol=1e-5, atol=1e-6)
    for step in range(3):
        t = lengths + step
        one = [np.asarray(x)[np.arange(B), t][:, None] for x in (QUERY, KEY, VALUE)]
        out, cache = _step(cache, *map(jnp.asarray, one))
        np.testing.assert_allclose(out[:, 0], FULL[np.arange(B), t], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cache.lengths, lengths + 3)
    assert int(cache.index) == 7


def test_every_leaf_with_a_beam_axis_moves_together():
    valid = jnp.array([[True] * 4, [False, True, True, True], [False, False, True, True]])
    cache = _empty().append(KEY[:, :4], VALUE[:, :4], valid)
    order = np.array([2, 0, 0])
    moved = cache.reorder(order)
    expected = _empty().append(KEY[order, :4], VALUE[order, :4], valid[order])
    chex.assert_trees_all_equal(moved, expected)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(after, before if before.ndim == 0 else before[order])
    two = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]) if x.ndim else x, cache)
    for axis, orders in ((1, np.array([[2, 0], [1, 1]])), (0, np.array([[1, 0, 0]]))):
        found = two.reorder(orders, axis=axis)
        for name in ("key", "token_positions", "lengths"):
            x, y = (np.asarray(getattr(c, name)) for c in (two, found))
            for i, j in np.ndindex(orders.shape):
                old = x[i, orders[i, j]] if axis else x[orders[i, j], j]
                np.testing.assert_array_equal(y[i, j], old)


@pytest.mark.parametrize("chunks", [(1,) * T, (5, 2), (2, 1, 4)], ids=str)
def test_a_rolling_cache_is_a_window(chunks):
    size = 3
    window = CAUSAL & aj.masks.window(size - 1, 0)
    full = aj.attend(QUERY, KEY, VALUE, mask=window)
    cache, outs, start = _poisoned(_empty(length=size, rolling=True)), [], 0
    for count in chunks:
        part = slice(start, start + count)
        query, key, value = QUERY[:, part], KEY[:, part], VALUE[:, part]
        positions = cache.next_positions(count)
        seen = cache.append(key, value) if count == 1 else cache.concatenate(key, value)
        outs.append(_look(query, seen, positions))
        cache = cache.append(key, value)
        start += count
    np.testing.assert_allclose(jnp.concatenate(outs, 1), full, rtol=1e-5, atol=1e-6)
    assert sorted(np.asarray(cache.positions()[0]).tolist()) == [4, 5, 6]


def test_sizes_dtypes_and_transforms():
    assert _empty((), 4).append(np.asarray(KEY[0, :2]), np.asarray(VALUE[0, :2])).batch == ()
    low = _empty(dtype=jnp.bfloat16).append(KEY, VALUE)
    assert low.key.dtype == low.value.dtype == jnp.bfloat16
    assert _empty((2, 3)).key.shape == (2, 3, LENGTH, K, H)
    chex.assert_trees_all_equal(_empty().append(KEY[:, :0], VALUE[:, :0]), _empty())
    mapped = jax.vmap(lambda k, v: _empty(()).append(k, v))(KEY, VALUE)
    np.testing.assert_array_equal(mapped.key, _empty().append(KEY, VALUE).key)
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(_empty().append(k, VALUE).key ** 2)))(KEY)
    np.testing.assert_allclose(gradient, 2 * KEY, rtol=1e-6)
    assert repr(_empty(2)).startswith("KVCache(key=float32[2, 9, 2, 4], value=")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: KVCache.init(2, -1, 2, 4), ValueError, ["length", "-1"]),
        (lambda: KVCache.init(2.0, 4, 2, 4), TypeError, ["batch", "float"]),
        (lambda: KVCache.init(2, 4, 0, 4), ValueError, ["heads", "0"]),
        (lambda: KVCache.init(2, 4, 1, 4, dtype=jnp.int32), TypeError, ["dtype", "int32"]),
        (lambda: _empty(2).append(KEY, VALUE), ValueError, ["key", "[2, T, 2, 4]", "[3, 7, 2, 4]"]),
        (lambda: _empty().append(KEY, VALUE[:, :2]), ValueError, ["key length 7", "2", "(T)"]),
        (lambda: _empty().append(KEY.astype(int), VALUE), TypeError, ["key", "int"]),
        (lambda: _empty().append(KEY, VALUE, np.ones(T)), TypeError, ["valid", "float64"]),
        (lambda: _empty().append(KEY, VALUE, np.ones(2, bool)), ValueError, ["valid", "[2]"]),
        (lambda: _empty().reorder(np.array([0, 3])), ValueError, ["order", "0..2", "3"]),
        (lambda: _empty().reorder(np.array([0.0])), TypeError, ["order", "float64"]),
        (lambda: _empty(()).reorder(np.array([0])), ValueError, ["axis", "[]"]),
        (
            lambda: aj.cache.KVCache.init(1, 2, 1, 1, dtype="small"),
            TypeError,
            ["dtype must be a floating dtype", "'small'"],
        ),
        (
            lambda: aj.attend(QUERY, KEY, VALUE, mask=_empty().mask()),
            ValueError,
            ["9 slots", "S = 7"],
        ),
    ],
)
def test_bad_use(call, error, words):
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
