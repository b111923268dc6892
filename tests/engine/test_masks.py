"""Masks: what is hidden weighs nothing, forward and backward, and every path hides the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.testing import reference_attention, reference_gradients
from tests.engine.tools import close, normals


def arrays(rng, batch, T, S, N=1, H=1, V=1, dtype=np.float32):
    return normals(rng, (*batch, T, N, H), (*batch, S, N, H), (*batch, S, N, V), dtype=dtype)


def test_a01_an_empty_row_poisons_nothing(attend, backed, rng):
    # Each position sees itself and the one before; item 2 ends in two keys of padding.
    q, k, v = arrays(rng, (2,), 4, 4)
    d_out = np.ones((2, 4, 1, 1), np.float32)
    d_out[1, 2:] = 0

    def run(q, k, v, lengths):
        return attend(q, k, v, mask=aj.masks.window(1, 0) & aj.masks.padding(lengths))

    whole = backed(lambda q, k, v: run(q, k, v, jnp.array([4, 2])))
    out, (dq, dk, dv) = whole(d_out, q, k, v)
    assert np.all(np.asarray(out)[1, 3] == 0)
    alone, gradients = backed(lambda q, k, v: run(q, k, v, jnp.array([2])))(
        d_out[1:, :2], q[1:, :2], k[1:, :2], v[1:, :2]
    )
    close(out[1:, :2], alone)
    for padded, unpadded in zip((dq, dk, dv), gradients, strict=True):
        close(padded[1:, :2], unpadded)
        assert np.all(np.asarray(padded)[1, 2:] == 0)

    # Any cotangent on the empty row changes nothing.
    d_out[1, 3] = 1e6
    for g, again in zip((dq, dk, dv), whole(d_out, q, k, v)[1], strict=True):
        np.testing.assert_array_equal(g, again)


def test_a01_shared_weights_stay_finite(attend, rng):
    x, w = normals(rng, (2, 4, 1, 3), (3, 3))
    x[1, 2:] = np.nan  # what padding may hold
    mask = np.ones((2, 1, 4, 4), bool)
    mask[1, :, :, 2:], mask[1, :, 2:] = False, False

    def loss(w):
        safe = jnp.where(jnp.isnan(x), 0, x)
        out = attend(safe @ w, safe, safe, mask=mask)
        return jnp.sum(out[0] ** 2) + jnp.sum(out[1, :2] ** 2)

    assert np.isfinite(jax.jit(jax.grad(loss))(w)).all()


def test_a02_the_gradient_of_a_masked_softmax():
    logits, keep = jnp.array([1.0, 1.0, 100.0]), np.array([True, True, False])

    def softmax(x):
        return aj.softmax.masked_softmax(x, keep)

    np.testing.assert_array_equal(softmax(logits), [0.5, 0.5, 0])
    close(jax.grad(lambda x: softmax(x)[0])(logits), [0.25, -0.25, 0])
    close(jax.grad(lambda x: softmax(x).sum())(logits), [0, 0, 0])
    # The same where what is visible lies far below what stands in for the masked.
    close(jax.grad(lambda x: softmax(x)[0])(logits - 1000), [0.25, -0.25, 0])
    nothing = jax.grad(lambda x: aj.softmax.masked_softmax(x, np.zeros(3, bool)).sum())
    np.testing.assert_array_equal(nothing(logits), [0, 0, 0])


@pytest.mark.parametrize("poison", [1e3, 1e30, np.inf, np.nan])
def test_a02_a_large_masked_key_has_no_gradient(attend, backed, rng, poison):
    q, k, v = arrays(rng, (2,), 5, 7, 2, 4, 3)
    mask = np.ones((5, 7), bool)
    mask[:, 3] = False
    expected = reference_attention(q, k, v, mask=mask).out
    d_out = rng.normal(size=expected.shape).astype(np.float32)
    exact = reference_gradients(q, k, v, d_out, mask=mask)
    k[:, 3] *= poison
    v[:, 3] *= poison
    out, gradients = backed(lambda q, k, v: attend(q, k, v, mask=mask))(d_out, q, k, v)
    close(out, expected)
    for got, right in zip(gradients, exact[:3], strict=True):
        close(got, right, atol=5e-6)
    for got in gradients[1:]:
        assert np.all(np.asarray(got)[:, 3] == 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a03_a_mask_suits_every_dtype(attend, sees, rng, dtype):
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]
    q, k, v = arrays(rng, (2,), 6, 7, 2, 4, 4, dtype=jnp.dtype(dtype))
    q, k = 4 * q, 4 * k  # scores near -16, on which finfo.min would overflow in float16
    mask = rng.random((2, 1, 6, 7)) < 0.7
    mask[..., 0] = True
    mask[0, :, 2] = False
    out = jax.jit(lambda q, k, v: attend(q, k, v, mask=mask))(q, k, v)
    weights = aj.attention_weights(q, k, mask=mask)
    ref = reference_attention(q, k, v, mask=mask)
    close(out, ref.out, rtol=tolerance, atol=tolerance)
    close(weights, ref.weights, rtol=tolerance, atol=tolerance)
    assert np.all(np.asarray(weights)[~np.broadcast_to(mask, weights.shape)] == 0)
    assert np.all(np.asarray(out)[0, 2] == 0)


def test_a06_a_boolean_mask_is_the_bias_of_zero_and_minus_infinity(attend, path, rng):
    q, k, v = arrays(rng, (1,), 5, 6, 2, 4, 3)
    mask = rng.random((5, 6)) < 0.6
    mask[2] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    close(attend(q, k, v, mask=mask), attend(q, k, v, bias=bias))
    close(aj.attention_weights(q, k, mask=mask), aj.attention_weights(q, k, bias=bias))
    by_mask = aj.attend_with_stats(q, k, v, mask=mask, **path)
    by_bias = aj.attend_with_stats(q, k, v, bias=bias, **path)
    for a, b in zip(jax.tree.leaves(by_mask), jax.tree.leaves(by_bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    two = attend(q[:, :1], 0 * k[:, :2], v[:, :2], mask=np.array([True, False]))
    close(two[0, 0], v[0, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a06_numbers_are_no_mask_and_booleans_no_bias(path, rng, dtype):
    q, k, v = arrays(rng, (1,), 5, 6, 2, 4, 3)
    mask = np.ones((5, 6), dtype)
    entries = [
        lambda **kw: aj.attend(q, k, v, **path, **kw),
        lambda **kw: aj.attend_with_stats(q, k, v, **path, **kw),
        lambda **kw: aj.explain(q, k, v, **path, **kw),
        lambda **kw: aj.attention_weights(q, k, **kw),
    ]
    for entry in entries:
        with pytest.raises(TypeError, match="bias"):
            entry(mask=mask)
        with pytest.raises(TypeError, match="bias"):
            entry(bias=mask.astype(bool))
    for strange in (lambda: aj.masks.from_array(mask), lambda: aj.masks.causal() & mask):
        with pytest.raises(TypeError):
            strange()
    with pytest.raises(TypeError):
        aj.softmax.masked_softmax(np.zeros(3, np.float32), np.ones(3, dtype))


COUNTS = {
    (1, 8): ([1], [8]),
    (2, 5): ([1, 2], [4, 5]),
    (5, 2): ([1, 2, 2, 2, 2], [0, 0, 0, 1, 2]),
}


@pytest.mark.parametrize("lengths", COUNTS)
@pytest.mark.parametrize("align", ["start", "end"])
def test_a07_causal_has_one_named_alignment(sees, lengths, align):
    T, S = lengths
    causal = aj.masks.causal(align=align)
    counts = COUNTS[lengths][align == "end"]
    assert sees(T, S, mask=causal).sum(1).tolist() == counts
    assert causal.to_array(T, S).sum(1).tolist() == counts
    shift = S - T if align == "end" else 0
    near = np.abs(np.arange(S)[None, :] - np.arange(T)[:, None]) <= 1
    past = np.arange(S)[None, :] <= np.arange(T)[:, None] + shift
    np.testing.assert_array_equal(sees(T, S, mask=causal & aj.masks.local(2)), past & near)


def test_a07_causal_is_absolute_where_positions_are_given(sees):
    at = {"query_positions": np.array([7], np.int32), "key_positions": np.arange(8, dtype=np.int32)}
    assert sees(1, 8, mask=aj.masks.causal(), **at).sum() == 8
    with pytest.raises(ValueError, match="align"):
        sees(1, 8, mask=aj.masks.causal(align="end"), **at)


OPTIONS = {
    "plain": {},
    "dropout": {"dropout_rate": 0.3},
    "mask": {"mask": True},
    "stats": {"stats": True},
    "batch": {"batch": (1, 2)},
    "bias": {"bias": True},
    "everything": {
        "dropout_rate": 0.3, "mask": True, "stats": True, "batch": (1, 2), "bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a08_no_option_loses_the_causal_mask(path, rng, name):
    options, L = OPTIONS[name], 6
    batch, rate = options.get("batch", (2,)), options.get("dropout_rate", 0.0)
    q, k, v = arrays(rng, batch, L, L, 2, 4, 3)
    seen = np.tril(np.ones((L, L), bool))
    mask, request = aj.masks.causal(), {}
    if "mask" in options:
        also = np.ones((L, L), bool)
        also[3:, 1] = False
        mask, seen = mask & aj.masks.from_array(also), seen & also
    if "bias" in options:
        request["bias"] = rng.normal(size=(L, L)).astype(np.float32)
    if rate:
        request.update(dropout_rate=rate, dropout_key=jax.random.key(3))

    @jax.jit
    def f(q, k, v):
        if "stats" in options:
            return aj.attend_with_stats(q, k, v, mask=mask, **path, **request)[0]
        return aj.attend(q, k, v, mask=mask, **path, **request)

    before = np.asarray(f(q, k, v))
    for s in range(L):
        other_k, other_v = k.copy(), v.copy()
        other_k[..., s, :, :] += 3
        other_v[..., s, :, :] += 3
        moved = (np.asarray(f(q, other_k, other_v)) != before).any(axis=(-1, -2))
        moved = moved.reshape(-1, L)
        assert not moved[:, ~seen[:, s]].any()
        if not rate:  # a dropped weight hides a change in its value
            assert moved[:, seen[:, s]].all()


def window_counts(left, right, causal, L):
    t, s = np.ogrid[:L, :L]
    pairs = (s >= t - left) & (s <= t + right) & ((s <= t) | (not causal))
    return pairs.sum(1).tolist()


@pytest.mark.parametrize("width", [1, 2, 3, 6, 9])
def test_a09_a_window_does_not_count_its_own_position(width):
    L, m = 6, aj.masks
    causal = m.window(width - 1, 0) & m.causal()
    assert causal.to_array(L, L).sum(1).tolist() == window_counts(width - 1, 0, True, L)
    both = m.window(width, width)
    assert both.to_array(L, L).sum(1).tolist() == window_counts(width, width, False, L)
    local = m.local(width)
    half = width // 2
    assert local.to_array(L, L).sum(1).tolist() == window_counts(half, half, False, L)


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (lambda m: m.window(2, 0) & m.causal(), [1, 2, 3, 3, 3, 3]),
        (lambda m: m.window(3, 0) & m.causal(), [1, 2, 3, 4, 4, 4]),
        (lambda m: m.window(3, 3), [4, 5, 6, 6, 5, 4]),
        (lambda m: m.window(8, 0), [1, 2, 3, 4, 5, 6]),
        (lambda m: m.local(1), [1, 1, 1, 1, 1, 1]),
    ],
)
def test_a09_every_path_counts_a_window_alike(sees, make, counts):
    assert sees(6, 6, mask=make(aj.masks)).sum(1).tolist() == counts


@pytest.mark.parametrize(
    "ids",
    [
        [0, 0, 0, 1, 1, 1],
        [7, 7, 7, 7, 3, 3],  # neither sorted nor from 0
        [5, 2, 5, 2, 2, 5],  # interleaved
        [1, 1, 1, 4, 4, 0],  # 0 is padding
    ],
)
def test_a10_a_packed_document_is_as_if_alone(attend, backed, rng, ids):
    ids = np.array(ids, np.int32)
    q, k, v = arrays(rng, (), 6, 6, 2, 4, 3)
    mask = aj.masks.segments(ids, padding_id=0)
    d_out = rng.normal(size=(6, 2, 3)).astype(np.float32)
    out, gradients = backed(lambda q, k, v: attend(q, k, v, mask=mask))(d_out, q, k, v)
    for document in set(ids.tolist()) - {0}:
        mine = ids == document
        alone = reference_attention(q[mine], k[mine], v[mine]).out
        close(np.asarray(out)[mine], alone)
        exact = reference_gradients(q[mine], k[mine], v[mine], d_out[mine])
        for got, right in zip(gradients, exact[:3], strict=True):
            close(np.asarray(got)[mine], right, atol=5e-6)
    if ids.tolist() == [0, 0, 0, 1, 1, 1]:
        return  # 0 is a document's own number there, and the padding's elsewhere
    padding = ids == 0
    for x in (out, *gradients):
        assert np.all(np.asarray(x)[padding] == 0)


def test_a10_a_document_does_not_move_with_another(attend, rng):
    ids = jnp.array([4, 4, 4, 9, 9, 9])
    at = jnp.array([0, 1, 2, 0, 1, 2])
    q, k, v = arrays(rng, (), 6, 6, 2, 4, 3)

    @jax.jit
    def f(q, k, v, ids, at):
        mask = aj.masks.segments(ids) & aj.masks.causal()
        return attend(q, k, v, mask=mask, query_positions=at, key_positions=at)

    before = np.asarray(f(q, k, v, ids, at))
    for s in range(6):
        moved_k, moved_v = k.copy(), v.copy()
        moved_k[s] += 2
        moved_v[s] += 2
        moved = (np.asarray(f(q, moved_k, moved_v, ids, at)) != before).any(axis=(1, 2))
        expected = [(t < 3) == (s < 3) and t >= s for t in range(6)]
        assert moved.tolist() == expected


@pytest.mark.parametrize(("T", "S", "empty"), [(76, 1, 75), (34, 1, 33), (5, 1, 4), (5, 2, 3)])
def test_a11_more_queries_than_keys_at_the_end(attend, backed, rng, T, S, empty):
    dtype = np.float16 if T > 5 else np.float32
    q, k, v = (3 * x for x in arrays(rng, (), T, S, 1, 32, 4, dtype=dtype))
    d_out = np.ones((T, 1, 4), dtype)
    causal = aj.masks.causal(align="end")
    out, gradients = backed(lambda q, k, v: attend(q, k, v, mask=causal))(d_out, q, k, v)
    mask = np.arange(S)[None, :] <= np.arange(T)[:, None] + S - T
    exact = reference_gradients(q, k, v, d_out, mask=mask)
    tolerance = 1e-5 if dtype == np.float32 else 2e-3
    expected = reference_attention(q, k, v, mask=mask).out
    close(out, expected, tolerance, tolerance)
    for got, right in zip(gradients, exact[:3], strict=True):
        close(got, right, tolerance, tolerance)
    assert np.all(np.asarray(out)[:empty] == 0)
    assert np.all(np.asarray(gradients[0])[:empty] == 0)
