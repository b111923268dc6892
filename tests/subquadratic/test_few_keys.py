"""Low-rank, Nyström and memory-compressed attention, and the limits in which they are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import masks
from attention_jax import subquadratic as sq
from attention_jax.subquadratic import few
from attention_jax.testing import reference_subquadratic as oracles

B, T, S, N, K, H, V = 2, 7, 11, 4, 2, 3, 5
RNG = np.random.default_rng(9)


def normals(*shape):
    return RNG.normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = normals(B, T, N, H), normals(B, S, K, H), normals(B, S, K, V)
LENGTHS = np.array([11, 6])
SEEN = np.arange(S) < LENGTHS[:, None]
PAIRS = SEEN[:, None, None, :]
PADDING = masks.padding(LENGTHS)


def test_identity_projections_equal_softmax_attention():
    one = np.eye(S, dtype=np.float32)
    scale = np.array([0.5, 1, 2, 3], np.float32)
    out = sq.low_rank_attention(QUERY, KEY, VALUE, one, mask=PADDING, scale=scale)
    query = QUERY * scale[:, None]
    np.testing.assert_allclose(out, oracles.dense(query, KEY, VALUE, PAIRS, 1), atol=2e-5)


def test_a_mask_per_head_with_projections():
    keys = RNG.random((B, N, 1, S)) < 0.5
    down = normals(K, 4, S)
    out = sq.low_rank_attention(QUERY, KEY, VALUE, down, mask=keys)
    for n in range(N):
        k = n // (N // K)
        head = QUERY[:, :, n : n + 1], KEY[:, :, k : k + 1], VALUE[:, :, k : k + 1]
        want = oracles.low_rank(*head, keys[:, n, 0], down[k : k + 1], down[k : k + 1])
        np.testing.assert_allclose(out[:, :, n : n + 1], want, atol=2e-5)


def test_one_landmark_per_token_equals_softmax_attention():
    x = normals(B, S, N, H)
    key = x[:, :, ::2]  # so that the middle factor is far from singular
    options = {"num_landmarks": 20, "iterations": 20, "scale": 3, "mask": PADDING}
    out = sq.nystrom_attention(x, key, VALUE, **options)
    want = oracles.dense(x, key, VALUE, PAIRS, 3)
    for b, length in enumerate(LENGTHS):  # padded queries are in no landmark
        got = out[b, :length, ::2]
        np.testing.assert_allclose(got, want[b, :length, ::2], atol=2e-3)


def test_nystrom_is_a_product_of_three_factors():
    want = oracles.nystrom(QUERY, KEY, VALUE, SEEN, 3)
    out = sq.nystrom_attention(QUERY, KEY, VALUE, num_landmarks=3, iterations=30, mask=PADDING)
    np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-3)


def test_runs_of_one_key_equal_softmax_attention():
    for mask, allowed in ((PADDING, PAIRS), (PADDING & masks.causal("end"), None)):
        allowed = PAIRS & np.tri(T, S, S - T, bool) if allowed is None else allowed
        out = sq.memory_compressed_attention(QUERY, KEY, VALUE, 1, mask=mask)
        np.testing.assert_allclose(out, oracles.dense(QUERY, KEY, VALUE, allowed), atol=2e-5)


def test_a_strided_convolution_with_padding_and_order():
    kernels = normals(3, H, H), normals(3, V, V)

    @jax.jit
    def run(query, key, value):
        out, pull = jax.vjp(
            lambda *x: sq.memory_compressed_attention(
                *x, 3, key_kernel=kernels[0], value_kernel=kernels[1], mask=PADDING & masks.causal()
            ),
            query,
            key,
            value,
        )
        return out, pull(out)

    out, grads = run(QUERY, KEY, VALUE)
    allowed = PAIRS & np.tri(T, S, dtype=bool)
    want = oracles.memory_compressed(QUERY, KEY, VALUE, SEEN, allowed, 3, kernels)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)
    with_nan = [np.where(SEEN[..., None, None], x, np.nan) for x in (KEY, VALUE)]
    for one, other in zip(jax.tree.leaves(run(QUERY, *with_nan)), [out, *grads], strict=True):
        np.testing.assert_array_equal(one, other)
    # One kernel per head, all equal.
    each = [np.stack([w] * K) for w in kernels]
    mask = PADDING & masks.causal()
    again = sq.memory_compressed_attention(
        QUERY, KEY, VALUE, 3, key_kernel=each[0], value_kernel=each[1], mask=mask
    )
    np.testing.assert_allclose(again, out, rtol=1e-5, atol=1e-6)


def test_many_queries_are_computed_in_runs(monkeypatch):
    shapes = (B, N, T, H), (B, K, S, H), (B, K, S, V)
    arrays = [jnp.asarray(normals(*shape)) for shape in shapes]
    order = jnp.arange(S, dtype=jnp.int32)[None, None], jnp.arange(T, dtype=jnp.int32)
    whole = few.attend_to_few(*arrays, *order)
    monkeypatch.setattr(few, "_RUN", 3)
    for run, other in zip(few.attend_to_few(*arrays, *order), whole, strict=True):
        np.testing.assert_allclose(run, other, rtol=1e-5, atol=1e-6)


def test_mistakes():
    arrays = QUERY, KEY, VALUE
    with pytest.raises(ValueError, match=r"key_projection has shape \[4, 7\]"):
        sq.low_rank_attention(*arrays, np.ones((4, 7), np.float32))
    with pytest.raises(ValueError, match=r"must match \(M\)"):
        sq.low_rank_attention(*arrays, np.ones((4, S), np.float32), np.ones((3, S), np.float32))
    with pytest.raises(ValueError, match="must be given together"):
        sq.memory_compressed_attention(*arrays, 2, key_kernel=np.ones((2, H, H), np.float32))
    with pytest.raises(ValueError, match="stride"):
        sq.memory_compressed_attention(*arrays, 0)
    wrong = {"key_kernel": np.ones((2, H, H)), "value_kernel": np.ones((3, V, V))}
    with pytest.raises(ValueError, match="value_kernel has shape"):
        sq.memory_compressed_attention(*arrays, 2, **wrong)
    with pytest.raises(ValueError, match="num_landmarks"):
        sq.nystrom_attention(*arrays, num_landmarks=0)
