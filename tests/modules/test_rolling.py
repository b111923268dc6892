"""A rolling cache holds all that a query sees, or is refused."""

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
    global_tokens,
    local,
    longformer,
    padding,
    prefix,
    random,
    strided,
    window,
)
from tests.modules.flavours import Made

T, WIDTH = 9, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, WIDTH)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, 7, size=(2, T)))
KEY = jax.random.key(0)
# By how many tokens a query sees, itself counted.
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
        with pytest.raises(ValueError, match=rf"length {reach - 1} .* sees {reach} tokens"):
            made(X[:, :size], small, method="with_cache")


@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_a_known_reach_it_is_refused(name, flavour):
    made = Made(flavour, _attention(UNBOUNDED[name]))
    cache = made.model.new_cache(2, 4, rolling=True)
    for size in (1, 3):
        with pytest.raises(ValueError, match=r"rolling cache of length 4 .*unlimited"):
            made(X[:, :size], cache, method="with_cache")


def test_the_mask_of_the_call_counts(flavour):
    made = Made(flavour, _attention(None))
    cache, x = made.model.new_cache(2, 4, rolling=True), X[:, :1]
    made(x, cache, mask=window(3, 0), method="with_cache")
    with pytest.raises(ValueError, match=r"length 4 .* sees 16 tokens"):
        made(x, cache, mask=window(15, 0), method="with_cache")
    with pytest.raises(ValueError, match=r"length 4 .*unlimited"):
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

    for mask, words in ((window(8, 0), "length 3 .* sees 9 tokens"), (None, "unlimited")):
        made = model(mask)
        with pytest.raises(ValueError, match=words):
            made(IDS, made.model.new_cache(2, 3, rolling=True), method="with_cache")
    for name in ("TransformerEncoderLayer", "TransformerEncoder"):
        sizes = (1, 2, WIDTH, 16) if name == "TransformerEncoder" else (2, WIDTH, 16)
        made = Made(flavour, lambda lib, n=name, s=sizes, **more: getattr(lib, n)(*s, **more))
        cache = made.model.new_cache(2, 4, rolling=True)
        with pytest.raises(ValueError, match=r"length 4 .*unlimited"):
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
    assert np.sort(cache.places, axis=-1).tolist() == [[3, 4, 5], [4, 5, 6]]
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
            with pytest.raises(ValueError, match=r"length 4 .* sees 16 tokens"):
                see(mask, attend)
