"""A rolling cache holds all keys visible to a query, or raises an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.masks import (
    axial,
    bigbird,
    block_diagonal,
    block_local,
    causal,
    custom,
    dilated,
    from_array,
    global_tokens,
    local,
    longformer,
    padding,
    prefix,
    random,
    segments,
    sparse_fixed,
    strided,
    summary_tokens,
    window,
)
from tests.modules.flavours import Made

T, WIDTH = 9, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, WIDTH)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 7, size=(2, T)))
KEY = jax.random.key(0)
# The numbers of tokens visible to a query, including itself.
BOUNDED = {
    "window": (window(3, 0), 4),
    "a window with keys after the query": (window(2, 5), 3),
    "local": (local(5), 3),
    "the smaller of two": (window(7, 0) & window(2, 0), 3),
    "the larger of two": (window(1, 0) | window(3, 0), 4),
    "block_diagonal": (block_diagonal(4), 4),
    "dilated": (dilated(5, 2), 5),
    "block_local": (block_local(2, 3), 4),
    "axial": (axial((2, 3), 1), 3),
    "longformer": (longformer(5, 0), 3),
    "with causal": (causal() & window(3, 0), 4),
    "with a mask by function": (window(3, 0) & custom(lambda q, k: (q + k) % 3 > 0), 4),
}
UNBOUNDED = {
    "none": None,
    "causal": causal(),
    "causal from the end": causal(align="end"),
    "to the right": window(None, 0),
    "custom": custom(lambda q, k: q - k < 3),
    "prefix": prefix(2) | window(3, 0),
    "global": longformer(3, 1),
    "global tokens": global_tokens([0]) | window(1, 0),
    "strided": strided(2),
    "random": random(KEY, 16, 2, 1),
    "bigbird": bigbird(KEY, 16, 2),
    "not": ~window(3, 0),
    "padding": padding(jnp.array([9, 9])),
    "array": np.ones((1, 1, 1, 4), bool),
}


ONES = np.ones((1, 1, 1, 4), bool)
# What decides in conjunction with a window is positions, or it is refused.
LENGTHS, QUERIES = np.array([6, 8]), np.array([7, 5])
WINDOWED = {
    "padding": padding(LENGTHS),
    "one length": padding(5),
    "traced lengths": padding(jnp.asarray(LENGTHS), jnp.asarray(QUERIES)),
    "both sides": padding(LENGTHS, QUERIES),
    "not padding": ~padding(LENGTHS),
    "either": padding(LENGTHS) | prefix(7),
    "prefix": prefix(4),
    "summary": summary_tokens(3, 2),
    "strided": strided(2),
    "fixed": sparse_fixed(3),
    "global": longformer(3, 1),
    "random": random(KEY, 16, 2, 2),
    "random by head": random(KEY, 16, 2, 2, 2),
    "bigbird": bigbird(KEY, 16, 2),
    "custom": custom(lambda q, k: (q + k) % 3 > 0),
    "from the end": causal(align="end"),
    "queries": from_array(np.ones((2, 1, 1, 1), bool)),
}
INDEXED = {
    "array": from_array(ONES),
    "not array": ~from_array(ONES),
    "segments": segments(np.zeros(1, int), np.zeros(4, int)),
    "within": padding(LENGTHS) | (prefix(3) & from_array(ONES)),
}


def _attention(mask):
    return lambda library, **more: library.MultiHeadAttention(2, WIDTH, mask=mask, **more)


def _steps(made, x, cache, chunks, **options):
    outs, start = [], 0
    for size in chunks:
        part = {k: v[:, start : start + size] for k, v in options.items()}
        out, cache = made(x[:, start : start + size], cache, method="with_cache", **part)
        outs.append(out)
        start += size
    return jnp.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("name", BOUNDED)
def test_the_interval_of_a_mask_bounds_what_is_visible(name):
    mask, reach = BOUNDED[name]
    query, key = np.nonzero(np.asarray(mask.to_array(12, 12)))
    interval = mask.interval()
    assert interval.left + 1 == reach == 1 + np.max(query - key)
    assert interval.right is None or interval.right >= np.max(key - query)


@pytest.mark.parametrize("name", ["window", "the larger of two"])
def test_a_cache_as_long_as_the_reach_is_enough(name, flavour):
    mask, reach = BOUNDED[name]
    made = Made(flavour, _attention(mask))
    full = made(X, is_causal=True)
    cache = made.model.new_cache(2, reach, rolling=True)
    run = jax.jit(lambda x, cache: _steps(made, x, cache, (2, 1, 6))[0])
    np.testing.assert_allclose(run(X, cache), full, rtol=1e-4, atol=1e-5)
    small = made.model.new_cache(2, reach - 1, rolling=True)
    for size in (1, T):
        with pytest.raises(ValueError, match=rf"length {reach - 1} .* {reach} tokens are visible"):
            made(X[:, :size], small, method="with_cache")


QUICK = ("both sides", "not padding")
EACH = [x if x in QUICK else pytest.param(x, marks=pytest.mark.thorough) for x in WINDOWED]


@pytest.mark.parametrize("name", EACH)
def test_positions_decide_under_every_mask(name, flavour):
    mask = window(3, 0) & WINDOWED[name]
    made = Made(flavour, _attention(mask))
    full = made(X, is_causal=True)
    for cache in (made.model.new_cache(2, 5, rolling=True), made.model.new_cache(2, T)):
        run = jax.jit(lambda x, cache: _steps(made, x, cache, (5, 1, 3))[0])
        np.testing.assert_allclose(run(X, cache), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EACH)
def test_positions_decide_in_attend(name):
    if "end" in name:  # refused with positions, as without a cache
        return
    heads = X.reshape(2, T, 2, WIDTH // 2)
    mask = window(3, 0) & causal() & WINDOWED[name]
    full = aj.attend(heads, heads, heads, mask=mask)
    cache = aj.cache.KVCache.init(2, 5, 2, WIDTH // 2, rolling=True)
    for t in range(T):
        new = heads[:, t : t + 1]
        at, cache = cache.next_positions(1), cache.append(new, new)
        if t not in (6, 8):
            continue
        options = {
            "mask": cache.mask() & mask,
            "query_positions": at,
            "key_positions": cache.positions(),
        }
        outs = [
            aj.attend(new, cache.key, cache.value, implementation=implementation, **options)
            for implementation in ("dense", "blockwise", "flash", None)
        ]
        shown = aj.attention_weights(new, cache.key, **options)
        outs.append(jnp.einsum("bnts,bsnv->btnv", shown, cache.value))
        for out in outs:
            np.testing.assert_allclose(out, full[:, t : t + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", INDEXED)
def test_masks_by_array_index_are_refused(name, flavour):
    given = INDEXED[name]
    made = Made(flavour, _attention(window(3, 0)))
    cache, x = made.model.new_cache(2, 4, rolling=True), X[:, :1]
    words = r"mask (from_array|segments)\(.*\) depends on the array index .* length 4"
    with pytest.raises(ValueError, match=words):
        made(x, cache, mask=given, method="with_cache")
    key = jnp.ones((2, 4, 1, 2))
    small = aj.cache.KVCache.init(2, 4, 1, 2, rolling=True).append(key, key)
    at = {"query_positions": jnp.array([3]), "key_positions": small.positions()}
    for attend in (aj.attend, aj.explain):
        with pytest.raises(ValueError, match=words):
            attend(key[:, :1], key, key, mask=small.mask() & (causal() & given), **at)


def test_an_array_bias_is_refused_unless_keys_are_alike(flavour):
    made = Made(flavour, _attention(window(3, 0)))
    cache, x = made.model.new_cache(2, 4, rolling=True), X[:, :1]
    alone, _ = made(x, cache, method="with_cache")
    same, _ = made(x, cache, bias=jnp.ones((1, 2, 1, 1)), method="with_cache")
    np.testing.assert_allclose(same, alone, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"bias .* depends on the array index .* length 4"):
        made(x, cache, bias=jnp.ones((1, 2, 1, 4)), method="with_cache")


@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_a_known_reach_it_is_refused(name, flavour):
    made = Made(flavour, _attention(UNBOUNDED[name]))
    cache = made.model.new_cache(2, 4, rolling=True)
    for size in (1, 3):
        with pytest.raises(ValueError, match=r"rolling cache of length 4 .*does not bound"):
            made(X[:, :size], cache, method="with_cache")


def test_the_mask_of_the_call_counts(flavour):
    made = Made(flavour, _attention(None))
    cache, x = made.model.new_cache(2, 4, rolling=True), X[:, :1]
    made(x, cache, mask=window(3, 0), method="with_cache")
    with pytest.raises(ValueError, match=r"length 4 .* 16 tokens are visible"):
        made(x, cache, mask=window(15, 0), method="with_cache")
    with pytest.raises(ValueError, match=r"length 4 .*does not bound"):
        made(x, cache, mask=np.ones((2, 1, 1, 4), bool), method="with_cache")


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"scan_layers": True}], ids=str)
def test_stacks_and_models(options, flavour):
    def model(mask):
        return Made(
            flavour,
            lambda library, **more: library.TransformerLM(
                1, 2, WIDTH, 16, 7, mask=mask, **options, **more
            ),
        )

    for mask, words in (
        (window(8, 0), "length 3 .* 9 tokens are visible"),
        (None, "does not bound"),
    ):
        made = model(mask)
        with pytest.raises(ValueError, match=words):
            made(IDS, made.model.new_cache(2, 3, rolling=True), method="with_cache")
    for name in ("TransformerEncoderLayer", "TransformerEncoder"):
        sizes = (1, 2, WIDTH, 16) if name == "TransformerEncoder" else (2, WIDTH, 16)
        made = Made(flavour, lambda lib, n=name, s=sizes, **more: getattr(lib, n)(*s, **more))
        cache = made.model.new_cache(2, 4, rolling=True)
        with pytest.raises(ValueError, match=r"length 4 .*does not bound"):
            made(X, cache, method="with_cache")


@pytest.mark.parametrize("chunks", [(4, 1, 1, 3), (T,)], ids=str)
def test_tokens_that_are_not_real_take_no_room_in_it(chunks, flavour):
    """Padding behind a prompt would overwrite tokens that later queries see."""
    real = np.ones((2, T), bool)
    real[0, 1:4], real[1, 6:8] = False, False
    made = Made(flavour, _attention(window(2, 0)))
    cache = made.model.new_cache(2, 3, rolling=True)
    run = jax.jit(lambda x, cache: _steps(made, x, cache, chunks, valid=real))
    found, cache = run(X, cache)
    for b, row in enumerate(real):
        alone = made(X[b, row], is_causal=True)
        np.testing.assert_allclose(found[b, row], alone, rtol=1e-4, atol=1e-5)
    assert np.sort(cache.token_positions, axis=-1).tolist() == [[3, 4, 5], [4, 5, 6]]
    assert int(cache.index) == T


def test_attend_refuses_a_window_that_is_longer_than_the_buffer():
    key = value = jnp.ones((1, 4, 1, 2))
    cache = aj.cache.KVCache.init(1, 4, 1, 2, rolling=True).append(key, value)
    query = jnp.ones((1, 1, 1, 2))
    at = {"query_positions": jnp.array([3]), "key_positions": cache.positions()}

    def see(mask, attend=aj.attend):
        given = (query, cache.key) if attend is aj.attention_weights else (query, key, value)
        return attend(*given, mask=mask, **at)

    for mask in (cache.mask(), cache.mask() & causal(), causal() & cache.mask() & window(3, 0)):
        see(mask)
    for attend in (aj.attend, aj.attend_with_stats, aj.attention_weights, aj.explain):
        for mask in (cache.mask() & window(15, 0), causal() & (window(15, 0) & cache.mask())):
            with pytest.raises(ValueError, match=r"length 4 .* 16 tokens are visible"):
                see(mask, attend)
