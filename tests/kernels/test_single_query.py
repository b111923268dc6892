"""A single query over the keys of a cache: values and gradients of the dense kernel."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.attend import make_request
from attention_jax.cache import KVCache
from attention_jax.kernels import dense, single_query, tiling

pytestmark = pytest.mark.thorough

B, S, N, K, H, V = 2, 7, 6, 3, 5, 4
RNG = np.random.default_rng(0)


def arrays(batch, dtype=jnp.float32):
    shapes = ((*batch, 1, N, H), (*batch, S, K, H), (*batch, S, K, V))
    return [jnp.asarray(RNG.normal(size=shape), dtype) for shape in shapes]


def run_single_query(request):
    return single_query.run(request, single_query.tile(request))


@jax.jit
def both(request):
    """Ours and the plain kernel's, each with a gradient of all that comes out."""

    def one(run):
        def loss(query, key, value):
            told = {"query": query, "key": key, "value": value}
            result = run(dataclasses.replace(request, **told))
            out, stats = result.out, result.stats
            seen = jnp.isfinite(stats.lse)
            parts = (out.astype(jnp.float32), jnp.where(seen, stats.lse, 0), stats.entropy)
            return sum(jnp.sum(jnp.sin(part)) for part in parts)

        given = (request.query, request.key, request.value)
        return run(request), jax.grad(loss, (0, 1, 2))(*given)

    return one(run_single_query), one(dense.run)


@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize(
    ("batch", "dtype", "mask", "score"),
    [
        ((B,), jnp.float32, RNG.random((B, N, 1, S)) > 0.6, None),
        ((), jnp.bfloat16, RNG.random((1, S)) > 0.3, aj.scores.dot()),
        ((B, 1), jnp.float32, None, aj.scores.scaled_dot(np.arange(N, dtype=np.float32))),
    ],
    ids=["heads", "low", "batches"],
)
def test_it_is_the_dense_kernel(batch, dtype, mask, score, spoiled):
    query, key, value = arrays(batch, dtype)
    if spoiled:  # seen by some, hidden from others, and nobody's neighbour
        key, value = key.at[..., 2, 0, 1].set(jnp.nan), value.at[..., 4, 1, 0].set(jnp.inf)
    mask = mask if mask is None else aj.masks.from_array(mask)
    request = make_request(query, key, value, mask=mask, score=score, statistics=True)
    tolerance = 1e-5 if dtype == jnp.float32 else 3e-2
    chex.assert_trees_all_close(*both(request), rtol=tolerance, atol=tolerance)


def test_what_a_cache_hides_and_what_it_lost():
    query, key, value = arrays((B,))
    cache = KVCache.init(B, S + 2, K, H, value_depth=V).append(key, value)
    unwritten = [jnp.where(jnp.arange(S + 2) < S, 0, jnp.nan)[None, :, None, None]] * 2
    for lost in (False, True):
        cache = dataclasses.replace(cache, overflowed=jnp.array([False, lost]))
        request = make_request(
            query,
            cache.key + unwritten[0],
            cache.value + unwritten[1],
            mask=cache.mask() & aj.masks.causal(),
            query_positions=cache.next_positions(1),
            key_positions=cache.positions(),
            statistics=True,
        )
        ours, plain = both(request)
        chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-5)
        assert bool(jnp.isnan(ours[0].out[1]).all()) == lost


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_nobody_sees_changes_no_bit(poison):
    query, key, value = arrays((B,))
    visible = np.array([True, False, True, True, False, True, True])
    run = jax.jit(lambda *qkv: run_single_query(make_request(*qkv, mask=visible[None])).out)
    hidden = ~visible[:, None, None]
    poisoned = (jnp.where(hidden, np.float32(poison), x) for x in (key, value))
    np.testing.assert_array_equal(run(query, *poisoned), run(query, key, value))


def test_what_somebody_sees_changes_no_bit_of_the_others():
    query, key, value = arrays((B,))
    run = jax.jit(lambda *qkv: run_single_query(make_request(*qkv, statistics=True)))
    good = run(query, key, value)
    of_key = run(query, key.at[0, 2, 0, 1].set(jnp.nan), value)  # example 0, heads 0 and 1
    of_value = run(query, key, value.at[0, 2, 0, 1].set(jnp.nan))  # and there one number
    of_query = run(query.at[0, 0, 1, 0].set(jnp.nan), key, value)
    for got, spoilt in (
        (of_key.out, np.s_[0, :, :2]),
        (of_value.out, np.s_[0, :, :2, 1]),
        (of_query.out, np.s_[0, :, 1]),
    ):
        expected = np.array(good.out)
        expected[spoilt] = np.nan
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(of_value.stats.lse, good.stats.lse)
    np.testing.assert_array_equal(of_key.stats.lse[1], good.stats.lse[1])


def test_a_request_that_it_cannot_compute_is_refused(monkeypatch):
    query, key, value = arrays((B,))

    def refused(why, *arrays, **options):
        with pytest.raises(NotImplementedError, match=why):
            aj.attend(*arrays, implementation="single_query", **options)

    pair = jnp.concatenate([query, query], 1)
    refused("needs T = 1, got T = 2", pair, key, value)
    refused("does not support bias", query, key, value, bias=jnp.zeros((1, S)))
    refused("does not support block_size", query, key, value, block_size=2)
    refused("cosine.*not a dot product", query, key, value, score=aj.scores.cosine(1.0))
    refused("V > 0", query, key, value[..., :0])
    dropped = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
    refused("no dropout", query, key, value, **dropped)
    visible = aj.masks.custom(lambda t, s: s <= t)
    refused("contains a user function", query, key, value, mask=visible)
    with jax.enable_x64(True):
        refused("32 bits, got int64", query, key, value, query_positions=np.arange(1))
    many = jnp.tile(key, (1, 1, 6, 1))[:, :, :17], jnp.tile(value, (1, 1, 6, 1))[:, :, :17]
    refused("at most 16, got K = 17", jnp.tile(query, (1, 1, 3, 1))[:, :, :17], *many)
    monkeypatch.setattr(tiling, "on_one_cpu", lambda: False)
    refused("a single CPU device", query, key, value)  # heads may be divided among devices
