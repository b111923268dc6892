"""Routed attention: selection of blocks, and exact attention to them."""

import numpy as np
import pytest

from attention_jax import masks
from attention_jax import subquadratic as sq
from attention_jax.testing import reference_subquadratic as oracles

B, T, S, N, K, H, V = 2, 7, 11, 4, 2, 3, 5
RNG = np.random.default_rng(10)


def normals(*shape):
    return RNG.normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = normals(B, T, N, H), normals(B, S, K, H), normals(B, S, K, V)
LENGTHS = np.array([11, 6])
SEEN = np.arange(S) < LENGTHS[:, None]
PADDING = masks.padding(LENGTHS)


def test_the_blocks_with_the_largest_products_of_means_are_selected():
    out = sq.routed_attention(QUERY, KEY, VALUE, block_size=2, num_blocks=2, mask=PADDING)
    want = oracles.routed(QUERY, KEY, VALUE, SEEN, 2, 2, causal=False)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)
    assert not np.allclose(out, oracles.dense(QUERY, KEY, VALUE, SEEN[:, None, None]), atol=1e-3)


@pytest.mark.parametrize("length", [S, 5])
def test_all_blocks_equal_softmax_attention(length):
    key, value = KEY[:, :length], VALUE[:, :length]
    mask = masks.causal("end")
    out = sq.routed_attention(QUERY, key, value, block_size=3, num_blocks=9, mask=mask)
    allowed = np.tri(T, length, length - T, bool)
    np.testing.assert_allclose(out, oracles.dense(QUERY, key, value, allowed), atol=2e-5)


def test_with_one_block_causal_order_selects_the_own_block():
    x = normals(B, S, N, H)
    mask = masks.causal()
    out = sq.routed_attention(x, KEY, VALUE, block_size=4, num_blocks=1, mask=mask)
    t = np.arange(S)
    allowed = (t[:, None] // 4 == t // 4) & (t <= t[:, None])
    np.testing.assert_allclose(out, oracles.dense(x, KEY, VALUE, allowed), atol=2e-5)


def test_later_tokens_do_not_affect_the_selection():
    x, key, value = normals(1, 24, 1, H), normals(1, 24, 1, H), normals(1, 24, 1, V)

    def run(*arrays):
        return sq.routed_attention(*arrays, block_size=4, num_blocks=2, mask=masks.causal())

    out = run(x, key, value)
    for at in (6, 13, 21):
        changed = [
            np.concatenate([a[:, :at], 5 * normals(*a[:, at:].shape)], 1) for a in (x, key, value)
        ]
        np.testing.assert_array_equal(run(*changed)[:, :at], out[:, :at])


def test_padding_does_not_affect_the_selection():
    x = normals(B, S, N, H)
    out = sq.routed_attention(x, KEY, VALUE, block_size=4, num_blocks=1, mask=PADDING)
    real = SEEN[..., None, None]
    changed = [np.where(real, a, 5 * normals(*a.shape)) for a in (x, KEY, VALUE)]
    again = sq.routed_attention(*changed, block_size=4, num_blocks=1, mask=PADDING)
    np.testing.assert_array_equal(np.where(real, again, 0), np.where(real, out, 0))


def test_mistakes():
    for options in ({"block_size": 0}, {"num_blocks": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            sq.routed_attention(QUERY, KEY, VALUE, **options)
