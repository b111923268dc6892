"""LSH attention: own keys, rounds, causal order and padding."""

import jax
import numpy as np
import pytest

from attention_jax import masks
from attention_jax import subquadratic as sq
from attention_jax.subquadratic import lsh
from attention_jax.testing import reference_subquadratic as oracles

B, T, N, K, H, V = 2, 11, 4, 2, 3, 5
RNG = np.random.default_rng(8)
QUERY = RNG.normal(size=(B, T, N, H)).astype(np.float32)
VALUE = RNG.normal(size=(B, T, K, V)).astype(np.float32)
HASH = jax.random.key(3)
SEEN = (np.arange(T) < np.array([[11], [7]]))[:, None, None, :]


def buckets(number, rounds):
    if number == 1:
        return np.zeros((rounds, B, N, T), int)
    directions = jax.random.normal(HASH, (rounds, N, H, number // 2))
    return oracles.hash_buckets(QUERY, directions)


@pytest.mark.parametrize(("number", "rounds", "window"), [(1, 1, None), (4, 3, 2)])
def test_rounds_are_one_softmax_over_their_union(number, rounds, window):
    options = {"num_buckets": number, "num_rounds": rounds, "window": window}
    for normalize in (True, False) if number == 1 else (True,):
        run = sq.lsh_attention(
            QUERY,
            VALUE,
            HASH,
            mask=masks.padding(np.array([11, 7])),
            normalize_keys=normalize,
            **options,
        )
        want = oracles.lsh(QUERY, VALUE, SEEN, buckets(number, rounds), window or T, normalize)
        np.testing.assert_allclose(run, want, rtol=1e-4, atol=1e-5)


def test_one_bucket_equals_softmax_attention_without_the_own_key():
    other = ~np.eye(T, dtype=bool)
    key = QUERY / np.linalg.norm(QUERY, axis=-1, keepdims=True)
    value = np.repeat(VALUE, N // K, axis=2)
    want = oracles.dense(QUERY, key, value, SEEN & other)
    options = {"num_buckets": 1, "mask": masks.padding(np.array([11, 7]))}
    out = sq.lsh_attention(QUERY, VALUE, HASH, **options)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    low = sq.lsh_attention(QUERY.astype(np.float16), VALUE.astype(np.float16), HASH, **options)
    assert low.dtype == np.float16
    np.testing.assert_allclose(low, want, rtol=5e-3, atol=5e-3)
    # A score of -5e4 for the own key gives the same result.
    scores = np.einsum("btnh,bsnh->bnts", *oracles.wide(QUERY, key)) / np.sqrt(H)
    scores = np.where(SEEN, np.where(np.eye(T, dtype=bool), -5e4, scores), -np.inf)
    weights = oracles.softmax(scores)
    np.testing.assert_allclose(np.einsum("bnts,bsnv->btnv", weights, value), want, atol=1e-6)


def test_the_own_key_is_visible_only_without_other_keys():
    value = np.array([1, 10, 100], np.float32).reshape(3, 1, 1)
    x = np.array([[1, 0], [1, 0], [-1, 0]], np.float32)[:, None]  # two of a kind, and one alone
    for dtype, rounds in ((np.float32, 3), (np.float16, 1)):
        arrays = x.astype(dtype), value.astype(dtype)
        out = sq.lsh_attention(*arrays, HASH, num_buckets=2, num_rounds=rounds)
        np.testing.assert_array_equal(out[:, 0, 0], [10, 1, 100])
    # The first token in causal order has no other key, whatever the scores.
    out = sq.lsh_attention(300 * x, value, HASH, num_buckets=2, mask=masks.causal(), scale=1e4)
    np.testing.assert_array_equal(out[:, 0, 0], [1, 1, 100])
    out = sq.lsh_attention(x, value, HASH, num_buckets=2, mask=np.array([[True, True, False]]))
    np.testing.assert_array_equal(out[:, 0, 0], [10, 1, 0])


def test_a_later_token_never_changes_an_earlier_output():
    x = RNG.normal(size=(40, 1, 4)).astype(np.float32)
    value = RNG.normal(size=(40, 1, 2)).astype(np.float32)

    @jax.jit
    def run(x, value):
        return sq.lsh_attention(
            x, value, HASH, num_buckets=4, num_rounds=2, window=3, mask=masks.causal()
        )

    out = run(x, value)
    for at in (5, 20, 39):
        other, changed = x.copy(), value.copy()
        other[at:], changed[at:] = RNG.normal(size=(40 - at, 1, 4)), 7
        again = run(other, changed)
        np.testing.assert_allclose(again[:at], out[:at], rtol=1e-5, atol=1e-6)
        assert not np.allclose(again[at:], out[at:])


def test_padding_does_not_count_in_a_window():
    def run(x, value, mask):
        options = {"num_buckets": 2, "window": 2, "mask": mask}
        return sq.lsh_attention(x, value, HASH, **options)

    x, value = QUERY[:1, :7], VALUE[:1, :7]
    holes = np.array([0, 2, 3, 5, 8, 9, 10])  # the same tokens, with others in between
    wide, wide_value = QUERY[:1].copy(), VALUE[:1].copy()
    wide[:, holes], wide_value[:, holes] = x, value
    real = np.zeros((1, 1, 1, T), bool)
    real[..., holes] = True
    out = run(wide, wide_value, real)
    np.testing.assert_allclose(out[:, holes], run(x, value, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kinds", [7, 2**31])  # one number for both, or a pair of numbers
def test_tokens_are_sorted_by_kind_and_then_by_index(kinds):
    kind = np.random.default_rng(0).integers(0, 7, size=(2, 1, 50)).astype(np.int32)
    want = np.argsort(kind, axis=-1, stable=True)
    np.testing.assert_array_equal(lsh._sorted(jax.numpy.asarray(kind), kinds), want)


def test_keys_are_not_duplicated_per_neighbour():
    shape = jax.ShapeDtypeStruct((2048, 1, 32), np.float32)
    run = jax.jit(lambda x, v: sq.lsh_attention(x, v, jax.random.key(0)))
    temporaries = run.lower(shape, shape).compile().memory_analysis().temp_size_in_bytes
    assert temporaries <= 9 * 4 * 2048 * 32


def test_mistakes():
    for options, text in (
        ({"num_buckets": 3}, "1, even"),
        ({"num_buckets": (4, 3)}, "1, even"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"window": 0}, "window"),
        ({"scale": np.ones(3, np.float32)}, r"\[N\] = \[4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            sq.lsh_attention(QUERY, VALUE, HASH, **options)
    with pytest.raises(ValueError, match="length"):
        sq.lsh_attention(QUERY, VALUE[:, :5], HASH)
