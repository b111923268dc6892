"""Masks against their definitions, the algebra, and sound block maps."""

import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax import masks

T, S = 7, 10
t, s = np.arange(T)[:, None], np.arange(S)
IDS = np.array([5, 5, 1, 1, -1, 9, 5])
KEY_IDS = np.array([1, 5, 5, 9, 9, -1, 5, 1, 1, 5])

CASES = {
    "causal": (masks.causal(), s <= t),
    "causal, end": (masks.causal(align="end"), s <= t + S - T),
    "window": (masks.window(2, 1), (t - 2 <= s) & (s <= t + 1)),
    "window, open": (masks.window(None, 0), s <= t),
    "local 5": (masks.local(5), abs(t - s) <= 2),
    "local 1": (masks.local(1), t == s),
    "prefix": (masks.prefix(3), (s < 3) & (t >= 0)),
    "prefix LM": (masks.prefix(3) | masks.causal(), (s < 3) | (s <= t)),
    "block_diagonal": (masks.block_diagonal(3), t // 3 == s // 3),
    "segments": (masks.segments(IDS, KEY_IDS), IDS[:, None] == KEY_IDS),
    "segments, padding": (
        masks.segments(IDS, KEY_IDS, padding_id=-1),
        (IDS[:, None] == KEY_IDS) & (KEY_IDS != -1),
    ),
    "not": (~masks.window(2, 1), ~((t - 2 <= s) & (s <= t + 1))),
    "and, not": (masks.causal() & ~masks.local(3), (s <= t) & ~(abs(t - s) <= 1)),
    "custom": (masks.custom(lambda t, s: (t * s) % 3 == 0), (t * s) % 3 == 0),
    "array": (masks.from_array((t + s) % 2 == 0), (t + s) % 2 == 0),
    "array row": (masks.from_array(s[None] > 3), (s > 3) & (t >= 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_to_array(name):
    mask, want = CASES[name]
    got = mask.to_array(T, S)
    assert got.shape == (T, S)
    np.testing.assert_array_equal(got, want)
    assert mask.density(T, S) == pytest.approx(want.mean())


def test_batch_and_head_axes_lead():
    lengths = np.array([3, 0])
    mask = masks.padding(lengths, np.array([7, 2]))
    want = (s < lengths[:, None, None]) & (t < np.array([7, 2])[:, None, None])
    assert mask.to_array(T, S).shape == (2, 1, T, S)
    np.testing.assert_array_equal(mask.to_array(T, S)[:, 0], want)
    assert mask.density(T, S) == pytest.approx(want.mean())
    heads = masks.from_array(np.ones((4, T, S), bool)) & mask
    assert heads.to_array(T, S).shape == (2, 4, T, S)


def test_explicit_positions():
    positions = np.array([[4, 5], [0, 9]])
    got = masks.causal().to_array(2, S, query_positions=positions)
    np.testing.assert_array_equal(got[:, 0], s <= positions[..., None])
    with pytest.raises(ValueError, match="align"):
        masks.causal(align="end").to_array(2, S, query_positions=positions[0])


@given(st.data())
def test_block_maps_are_sound_and_composed(data):
    T, S = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 13))
    size = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    number = st.integers(0, 6)

    def leaf():
        return st.one_of(
            st.just(masks.causal()),
            st.just(masks.causal(align="end")),
            st.builds(masks.window, number, number),
            st.builds(masks.prefix, number),
            st.builds(masks.block_diagonal, st.integers(1, 5)),
            st.builds(
                lambda seed: masks.segments(
                    np.random.default_rng(seed).integers(0, 3, T),
                    np.random.default_rng(seed + 1).integers(0, 3, S),
                    padding_id=0,
                ),
                number,
            ),
            st.builds(lambda n, m: masks.padding(np.array([n]), np.array([m])), number, number),
            st.builds(
                lambda seed: masks.from_array(np.random.default_rng(seed).random((T, S)) < 0.8),
                number,
            ),
        )

    mask = data.draw(
        st.recursive(
            leaf(),
            lambda inner: st.one_of(
                st.builds(lambda a, b: a & b, inner, inner),
                st.builds(lambda a, b: a | b, inner, inner),
                st.builds(lambda a: ~a, inner),
            ),
            max_leaves=3,
        )
    )
    plane = np.asarray(mask.to_array(T, S)).reshape(T, S)
    kinds = np.asarray(mask.block_map(T, S, size).kinds)
    assert kinds.dtype == np.int8
    kinds = kinds.reshape(kinds.shape[-2:])
    for i, j in np.ndindex(kinds.shape):
        block = plane[i * size[0] : (i + 1) * size[0], j * size[1] : (j + 1) * size[1]]
        if kinds[i, j] == 0:
            assert not block.any()
        if kinds[i, j] == 2:
            assert block.all()


def test_large_ids_are_distinguished():
    far = 2**40
    for query_ids, key_ids, padding_id in (
        (np.array([far, 0, far + 2**32, far]), None, None),
        (np.array([far, 0, -1, far]), np.array([0, 2**32 - 1, far], np.uint64), 0),
        (np.array([-1, 0, 5], np.int32), jnp.array([2**32 - 1, 0, 5, 1], jnp.uint32), None),
        (jnp.array([2**32 - 1, 0, 5], jnp.uint32), None, 2**32 - 1),
        (np.array([0, 1], np.uint8), np.array([1, 0], np.int8), far),
    ):
        keys = query_ids if key_ids is None else key_ids
        mask = masks.segments(query_ids, key_ids, padding_id)
        pairs = [[int(t) == int(s) != padding_id for s in keys] for t in query_ids]
        np.testing.assert_array_equal(mask.to_array(len(query_ids), len(keys)), pairs)
        kinds = mask.block_map(len(query_ids), len(keys), 1).kinds
        np.testing.assert_array_equal(kinds, 2 * np.array(pairs))
    with pytest.raises(ValueError, match="32 bits"):
        masks.segments(np.array([far]), jnp.array([1]))


def test_lengths_and_positions_beyond_32_bits():
    lengths = np.array([2**40, 2, -(2**31) - 5])
    np.testing.assert_array_equal(masks.padding(lengths).to_array(1, 3).sum(-1).ravel(), [3, 2, 0])
    assert masks.padding(2**40).to_array(1, 3).all()
    for kind in (np.int64, np.uint32):
        positions = np.array([0, 2**31]).astype(kind)
        with pytest.raises(ValueError, match="key_positions must fit in 32 bits"):
            masks.causal().to_array(2, 2, key_positions=positions)


@pytest.mark.parametrize(
    ("left", "right"), [(2, 1), (None, 0), (3, None), (10**12, 0), (2**31 - 1, 2**31 - 1)]
)
def test_a_window_near_the_ends_of_the_integers(left, right):
    end = 2**31 - 1
    queries, keys = np.array([0, 5, end, -end - 1]), np.array([0, 3, end, -end - 1, end - 2])
    distance = keys[None, :] - queries[:, None]  # in 64 bits
    expected = (left is None) | (distance >= -(left or 0))
    expected &= (right is None) | (distance <= (right or 0))
    mask, at = masks.window(left, right), {"query_positions": queries, "key_positions": keys}
    np.testing.assert_array_equal(mask.to_array(4, 5, **at), expected)
    np.testing.assert_array_equal(mask.block_map(4, 5, 1, **at).kinds, 2 * expected)


def test_block_map_of_simple_masks_is_exact():
    kinds = masks.causal().block_map(9, 9, 3).kinds
    np.testing.assert_array_equal(kinds, [[1, 0, 0], [2, 1, 0], [2, 2, 1]])
    kinds = masks.segments(np.repeat([4, 2], 6)).block_map(12, 12, 6).kinds
    np.testing.assert_array_equal(kinds, [[2, 0], [0, 2]])


def test_a_million_by_a_million():
    masks.window(256, 0).block_map(100, 100, 10)
    started = time.perf_counter()
    found = masks.window(256, 0).block_map(1_000_000, 1_000_000, 512)
    assert time.perf_counter() - started < 2  # milliseconds on an idle machine
    assert found.kinds.shape == (1954, 1954)
    assert int(found.visited) == 2 * 1954 - 1


def test_printed_block_maps():
    text = str(masks.causal().block_map(4, 4, 2))
    assert "▒·" in text
    assert "█▒" in text
    assert "3 of 4 blocks visited (75.0%), 2 of them partial" in text
    assert len(str(masks.causal().block_map(10_000, 10_000, 10)).splitlines()) < 70


def test_repr_is_the_call():
    mask = masks.causal() & masks.window(255, 0) | ~masks.prefix(3)
    assert repr(mask) == "(causal() & window(255, 0)) | ~prefix(3)"
    assert mask == masks.causal() & masks.window(255, 0) | ~masks.prefix(3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.causal("middle"), ValueError, 'align must be "start" or "end"'),
        (lambda: masks.window(-1, 0), ValueError, "left must be at least 0, got -1"),
        (lambda: masks.local(0), ValueError, "size must be at least 1, got 0"),
        (lambda: masks.from_array(np.ones((2, 2))), TypeError, "bias"),
        (lambda: masks.from_array(np.ones((2, 2), int)), TypeError, r"write mask.astype\(bool\)"),
        (lambda: masks.causal() & np.ones((2, 2), bool), TypeError, "& joins mask objects"),
        (lambda: np.ones((2, 2), bool) | masks.causal(), TypeError, r"\| joins mask objects"),
        (lambda: masks.padding(np.array([1.0])), TypeError, "key_lengths must be integers"),
        (lambda: masks.segments(np.zeros(3)), TypeError, "query_ids must be integers"),
        (lambda: bool(masks.causal()), TypeError, "& |"),
        (lambda: masks.segments(IDS).to_array(T, S), ValueError, "key_ids has length 7 but S = 10"),
        (
            lambda: masks.custom(lambda t, s: t + s).to_array(T, S),
            TypeError,
            "must return a boolean",
        ),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()
