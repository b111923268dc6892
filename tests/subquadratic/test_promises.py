"""Guarantees of every family: padding, causal order, empty rows, non-finite values, sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import masks
from attention_jax import subquadratic as sq
from attention_jax.testing import reference_subquadratic as oracles

B, T, N, K, H, V = 3, 11, 4, 2, 3, 5
RNG = np.random.default_rng(5)


def normals(*shape):
    return RNG.normal(size=shape).astype(np.float32)


DOWN = normals(K, 4, T), normals(K, 4, T)
HASH = jax.random.key(3)
DIRECTIONS = jax.random.normal(HASH, (2, N, H, 2))
FAVOR = sq.favor_features(jax.random.key(1), H, 7)
LENGTHS = np.array([11, 6, 0])
SEEN = np.arange(T) < LENGTHS[:, None]
PAIRS = SEEN[:, None, None, :]
ORDER = np.tri(T, dtype=bool)
QUERY, KEY, VALUE = normals(B, T, N, H), normals(B, T, K, H), normals(B, T, K, V)


def elu(x, positions):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def favor(x, positions):
    x = x / H**0.25
    return np.exp(x @ np.float64(FAVOR.projection).T - (x * x).sum(-1, keepdims=True) / 2)


def lsh(query, key, value, **options):
    options = {"num_buckets": 4, "num_rounds": 2, "window": 2, **options}
    return sq.lsh_attention(query, value, HASH, **options)


def lsh_oracle(query, key, value, allowed):
    return oracles.lsh(query, value, allowed, oracles.hash_buckets(query, DIRECTIONS), 2)


def low_rank(query, key, value, **options):
    return sq.low_rank_attention(query, key, value, *DOWN, **options)


# name: the family, its reference on (query, key, value, allowed pairs), and whether it is causal
FAMILIES = {
    "linear": (
        partial(sq.linear_attention, chunk_size=4),
        lambda q, k, v, allowed: oracles.linear(q, k, v, allowed, elu),
        True,
    ),
    "linear, favor": (
        partial(sq.linear_attention, feature_map=FAVOR, chunk_size=4),
        lambda q, k, v, allowed: oracles.linear(q, k, v, allowed, favor),
        True,
    ),
    "low_rank": (
        low_rank,
        lambda q, k, v, allowed: oracles.low_rank(q, k, v, SEEN, *DOWN),
        False,
    ),
    "nystrom": (
        partial(sq.nystrom_attention, num_landmarks=3),
        lambda q, k, v, allowed: oracles.nystrom(q, k, v, SEEN, 3, SEEN, oracles.newton_inverse),
        False,
    ),
    "memory_compressed": (
        lambda q, k, v, **options: sq.memory_compressed_attention(q, k, v, 3, **options),
        lambda q, k, v, allowed: oracles.memory_compressed(q, k, v, SEEN, allowed, 3),
        True,
    ),
    "lsh": (lsh, lsh_oracle, True),
    "routed": (
        partial(sq.routed_attention, block_size=3, num_blocks=2),
        lambda q, k, v, allowed: oracles.routed(q, k, v, SEEN, 3, 2, causal=True),
        True,
    ),
}


@pytest.mark.parametrize("name", ["linear", "low_rank", "nystrom", "memory_compressed", "routed"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("mask", [None, masks.padding(LENGTHS)], ids=["none", "padding"])
def test_grouped_heads_are_repeated_heads(name, kv_heads, mask):
    attention = FAMILIES[name][0]
    if name == "low_rank":
        attention = lambda q, k, v, **options: sq.low_rank_attention(  # noqa: E731
            q, k, v, DOWN[0][0], DOWN[1][0], **options
        )

    def loss(key, value):
        return (attention(QUERY, key, value, mask=mask) ** 2).sum()

    def of_repeated(key, value):
        return loss(*(jnp.repeat(x, N // kv_heads, axis=2) for x in (key, value)))

    arrays = jnp.asarray(KEY[:, :, :kv_heads]), jnp.asarray(VALUE[:, :, :kv_heads])
    got, wanted = (jax.value_and_grad(f, (0, 1))(*arrays) for f in (loss, of_repeated))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=FAMILIES, scope="module")
def family(request):
    """The family and its gradients, compiled, with padding, and causal order if supported."""
    attention, oracle, ordered = FAMILIES[request.param]
    mask = masks.padding(LENGTHS) & masks.causal() if ordered else masks.padding(LENGTHS)

    def run(d_out, *arrays):
        out, pull = jax.vjp(lambda *x: attention(*x, mask=mask), *arrays)
        return out, pull(d_out)

    allowed = PAIRS & ORDER if ordered else np.broadcast_to(PAIRS, (B, 1, T, T))
    return request.param, jax.jit(run), oracle, allowed


def test_values_with_padding_and_masked_non_finite_values(family):
    name, run, oracle, allowed = family
    want = oracle(QUERY, KEY, VALUE, allowed)
    real = np.where(SEEN[..., None, None], np.float32(1), 0)
    d_out = normals(B, T, N, V) * real  # padding is not part of the loss
    out, grads = run(d_out, QUERY, KEY, VALUE)
    np.testing.assert_allclose(out, want, rtol=2e-4, atol=2e-5)
    assert not np.asarray(out)[2].any()  # an empty row
    for grad, x in zip(grads, (QUERY, KEY, VALUE), strict=True):
        assert np.isfinite(grad).all()
        assert not np.asarray(grad)[2].any()
        assert np.asarray(grad)[0].any() or (name == "lsh" and x is KEY)
    # NaN and infinity in masked entries: bitwise equal results.
    hidden = ~SEEN[..., None, None]
    with_nan = [np.where(hidden, bad, x) for bad, x in ((np.nan, KEY), (np.inf, VALUE))]
    query = np.where(hidden, np.nan, QUERY) if name == "lsh" else QUERY
    again, again_grads = run(d_out, query, *with_nan)
    np.testing.assert_array_equal(np.where(real, again, 0), np.where(real, out, 0))
    for grad, other in zip(grads, again_grads, strict=True):
        np.testing.assert_array_equal(other, grad)


def test_visible_non_finite_values_give_nan_in_the_rows_that_see_them(family):
    name, run, _, allowed = family
    at = 4
    key, value, query = KEY.copy(), VALUE.copy(), QUERY.copy()
    key[0, at], value[0, at, :, 1] = np.nan, np.inf
    if name == "lsh":  # whose keys are its queries
        query[0, at], value[0, at, :, 1] = np.nan, 1
    early = np.zeros((B, T, N, V), np.float32)
    early[:, :at] = 1
    clean, _ = run(early, QUERY, KEY, VALUE)
    out, grads = run(early, query, key, value)
    if allowed[0, 0, 0, at]:  # no order: all of them see it
        assert np.isnan(out[0]).all()
    else:
        np.testing.assert_allclose(out[:, :at], clean[:, :at], rtol=1e-5, atol=1e-6)
        assert all(np.isfinite(grad).all() for grad in grads)
        assert np.isnan(out[0, at:]).any() or name == "memory_compressed"
    np.testing.assert_allclose(out[1:], clean[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(name):
    attention, oracle, ordered = FAMILIES[name]
    mask, allowed = masks.padding(LENGTHS), np.broadcast_to(PAIRS, (B, 1, T, T))
    if ordered:
        mask, allowed = mask & masks.causal(), PAIRS & ORDER
    low = [x.astype(np.float16) for x in (QUERY, KEY, VALUE)]
    out = attention(*low, mask=mask)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, oracle(*low, allowed), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_empty_sizes(name):
    attention, _, _ = FAMILIES[name]
    if name != "low_rank":  # its projection has a length of its own
        nobody = [x[:, :0] for x in (QUERY, KEY, VALUE)]
        assert attention(*nobody, mask=masks.padding(LENGTHS)).shape == (B, 0, N, V)
    if name != "lsh":
        assert attention(QUERY[:, :0], KEY, VALUE).shape == (B, 0, N, V)
    if name not in ("lsh", "low_rank"):
        out = attention(QUERY, KEY[:, :0], VALUE[:, :0])
        np.testing.assert_array_equal(out, np.zeros((B, T, N, V)))


def test_no_batch_axis_and_several():
    mask = np.ones((1, T), bool)
    mask[0, -2:] = False
    run = partial(sq.routed_attention, block_size=3, num_blocks=2)
    one = run(QUERY[0], KEY[0], VALUE[0], mask=mask)
    assert one.shape == (T, N, V)
    several = [x[:2].reshape(2, 1, *x.shape[1:]) for x in (QUERY, KEY, VALUE)]
    out = run(*several, mask=masks.padding(np.array([[T - 2], [4]])))
    assert out.shape == (2, 1, T, N, V)
    np.testing.assert_allclose(out[0, 0], one, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_unsupported_masks_raise(name):
    attention, _, ordered = FAMILIES[name]
    arrays = QUERY, KEY, VALUE
    for mask in (masks.window(2, 2), masks.from_array(ORDER), ~masks.causal(), ORDER):
        with pytest.raises(ValueError, match="supports only masks"):
            attention(*arrays, mask=mask)
    if not ordered:
        with pytest.raises(ValueError, match="causal order"):
            attention(*arrays, mask=masks.causal())
    with pytest.raises(TypeError, match="mask must be boolean"):
        attention(*arrays, mask=np.ones((B, 1, 1, T), np.float32))
    with pytest.raises(ValueError, match="does not broadcast"):
        attention(*arrays, mask=np.ones((B + 1, 1, 1, T), bool))
    with pytest.raises(ValueError, match="multiple of key/value heads"):
        attention(QUERY[:, :, :3], KEY, VALUE)


def test_masks_per_head_and_per_query():
    keys = RNG.random((B, N, 1, T)) < 0.6
    queries = RNG.random((B, 1, T, 1)) < 0.7
    mask = masks.from_array(keys) & masks.from_array(queries) & masks.prefix(9)
    allowed = keys & queries & (np.arange(T) < 9)
    out = sq.routed_attention(QUERY, KEY, VALUE, block_size=4, num_blocks=3, mask=mask)
    np.testing.assert_allclose(out, oracles.dense(QUERY, KEY, VALUE, allowed), atol=1e-5)
    out = sq.linear_attention(QUERY, KEY, VALUE, mask=mask & masks.window(None, 1))
    allowed = allowed & np.tri(T, k=1, dtype=bool)
    np.testing.assert_allclose(out, oracles.linear(QUERY, KEY, VALUE, allowed, elu), atol=1e-5)


def test_constant_values_give_constant_outputs():
    value = np.full((B, T, K, 1), np.float32(3))
    mask = masks.padding(np.array([11, 6, 1]))
    for name in ("linear, favor", "memory_compressed", "lsh"):
        out = FAMILIES[name][0](QUERY, KEY, value, mask=mask)
        sees = np.ones((B, T), bool) if name != "lsh" else np.arange(T) < np.array([[11], [6], [1]])
        np.testing.assert_allclose(out[sees], 3, rtol=1e-5)


def test_transformations_agree():
    run = partial(sq.linear_attention, feature_map=FAVOR, mask=masks.causal(), chunk_size=4)
    out = run(QUERY, KEY, VALUE)
    np.testing.assert_allclose(jax.vmap(run)(QUERY, KEY, VALUE), out, rtol=1e-5, atol=1e-6)
    tangents = jax.jvp(lambda q: run(q, KEY, VALUE).sum(), (QUERY,), (QUERY,))[1]
    slope = jax.grad(lambda q: run(q, KEY, VALUE).sum())(jnp.asarray(QUERY))
    np.testing.assert_allclose(tangents, jnp.sum(slope * QUERY), rtol=1e-3)
    assert aj.subquadratic is sq


@pytest.mark.devices(2)
def test_a_sharded_batch():
    run = partial(sq.routed_attention, block_size=3, num_blocks=2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("data")
    divided = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split)
    arrays = [jnp.asarray(x[:2]) for x in (QUERY, KEY, VALUE)]
    np.testing.assert_allclose(jax.jit(divided)(*arrays), run(*arrays), rtol=1e-5, atol=1e-6)
