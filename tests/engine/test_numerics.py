"""Low precision, the scale, blocks that do not divide, and the log-sum-exp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.testing import reference_attention, reference_gradients
from tests.engine.tools import close, normals


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("T", [1, 5])
def test_a04_scores_past_the_range_of_float16(attend, backed, rng, dtype, T):
    kind = jnp.dtype(dtype)
    q, k = np.full((T, 2, 128), 30, kind), np.full((7, 2, 128), 30, kind)
    (v,) = normals(rng, (7, 2, 3), dtype=kind)
    tolerance = 2e-3 if dtype == "float16" else 2e-2
    d_out = np.ones((T, 2, 3), kind)
    out, (_, _, dv) = backed(attend)(d_out, q, k, v)
    mean = np.broadcast_to(v.astype(np.float64).mean(axis=0), (T, 2, 3))
    close(out, mean, tolerance, tolerance)
    close(dv, np.full((7, 2, 3), T / 7), tolerance, tolerance)
    close(aj.attention_weights(q, k), np.full((2, T, 7), 1 / 7), tolerance, tolerance)


def test_a04_gradients_of_many_blocks_add_up_in_float32(blocked, backed, rng):
    q, k, v, d_out = normals(rng, *[(64, 1, 4)] * 4, dtype=jnp.bfloat16)
    exact = reference_gradients(q, k, v, d_out)[:3]

    def errors(block):
        f = backed(lambda *x: aj.attend(*x, implementation=blocked, block_size=block))
        gradients = f(d_out, q, k, v)[1]
        return [
            np.sqrt(np.mean((np.asarray(g, np.float64) - right) ** 2))
            for g, right in zip(gradients, exact, strict=True)
        ]

    for many, one in zip(errors(2), errors(64), strict=True):
        assert many < 2 * one  # over four times in bfloat16


def test_a04_statistics_of_half_precision_are_float32(path):
    q = np.full((3, 1, 128), 30, np.float16)
    _, stats = aj.attend_with_stats(q, q, q, **path)
    assert {x.dtype for x in jax.tree.leaves(stats)} == {np.dtype(np.float32)}
    close(stats.max_logit, np.full((1, 3), 128 * 900 / np.sqrt(128)))
    close(stats.entropy, np.full((1, 3), np.log(3)), 1e-5, 2e-3)  # lse ~ 1e4 in float32


@pytest.mark.parametrize(
    ("T", "S", "block"),
    [(1, 1, 4), (3, 4, 4), (5, 3, 4), (6, 6, 4), (5, 7, 16), (7, 5, (2, 3)), (4, 8, (4, 1))],
)
def test_a12_no_length_has_to_fit_a_block(blocked, backed, rng, T, S, block):
    q, k, v = normals(rng, (T, 2, 3), (S, 1, 3), (S, 1, 4))
    f = backed(lambda *x: aj.attend(*x, implementation=blocked, block_size=block))
    expected = reference_attention(q, k, v).out
    d_out = rng.normal(size=expected.shape).astype(np.float32)
    first, again = f(d_out, q, k, v), f(d_out, q, k, v)
    close(first[0], expected)
    exact = reference_gradients(q, k, v, d_out)
    for got, right in zip(first[1], exact[:3], strict=True):
        close(got, right, atol=5e-6)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a12_length_192_in_blocks_of_128(blocked, backed, rng):
    q, k, v, d_out = normals(rng, *[(1, 192, 8, 16)] * 4, dtype=jnp.bfloat16)
    f = backed(lambda *x: aj.attend(*x, implementation=blocked, block_size=128))
    plain = backed(lambda *x: aj.attend(*x, implementation="dense"))
    out, gradients = f(d_out, q, k, v)
    expected, exact = plain(d_out, q, k, v)
    close(out, expected, 2e-2, 1e-2)
    for got, right in zip(gradients, exact, strict=True):
        close(got, right, 2e-2, 1e-2)


@pytest.mark.parametrize("size", [0, -1, (2, 0), (1, 2, 3), 2.0, "4"])
def test_a12_a_block_is_an_int_or_a_pair(blocked, size):
    x = np.ones((3, 1, 2), np.float32)
    with pytest.raises((ValueError, TypeError), match="block_size"):
        aj.attend(x, x, x, implementation=blocked, block_size=size)


def test_a12_dense_has_no_blocks():
    x = np.ones((3, 1, 2), np.float32)
    with pytest.raises(NotImplementedError, match="block"):
        aj.attend(x, x, x, implementation="dense", block_size=2)


def test_a13_the_gradient_through_lse(path, backed, rng):
    T, S, N = 5, 7, 2
    q, k, v = normals(rng, (T, N, 3), (S, N, 3), (S, N, 4))
    mask = rng.random((N, T, S)) < 0.7
    mask[:, :, 0] = True

    def loss(q, k, v):
        out, stats = aj.attend_with_stats(q, k, v, mask=mask, **path)
        return jnp.sum(out * jnp.exp(stats.lse).T[:, :, None])

    value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)
    ref = reference_attention(q, k, v, mask=mask)
    mass = np.exp(ref.lse).T[:, :, None]
    close(value, (ref.out * mass).sum())
    d_out = np.broadcast_to(mass, ref.out.shape)
    exact = reference_gradients(q, k, v, d_out, d_lse=(ref.out * mass).sum(-1).T, mask=mask)
    for got, right in zip(gradients, exact[:3], strict=True):
        close(got, right, atol=5e-6)


def test_a13_every_statistic_has_its_gradient(path, rng):
    q, k, v = normals(rng, (2, 4, 2, 3), (2, 5, 2, 3), (2, 5, 2, 3))
    mask = rng.random((2, 2, 4, 5)) < 0.7
    mask[0, 0, 1] = False  # an empty row has gradient 0 in every statistic
    d_lse, d_entropy = normals(rng, (2, 2, 4), (2, 2, 4))

    def loss(q, k, v):
        _, stats = aj.attend_with_stats(q, k, v, mask=mask, **path)
        lse = jnp.where(jnp.isfinite(stats.lse), stats.lse, 0.0)
        return jnp.sum(d_lse * lse) + jnp.sum(d_entropy * stats.entropy)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    exact = reference_gradients(q, k, v, d_lse=d_lse, d_entropy=d_entropy, mask=mask)
    for got, right in zip(gradients, exact[:3], strict=True):
        close(got, right, atol=5e-6)

    _, stats = aj.attend_with_stats(q, k, v, mask=mask, **path)
    ref = reference_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(stats.lse, ref.lse, rtol=1e-5, atol=1e-6)
    logs = np.log(np.where(ref.weights > 0, ref.weights, 1.0))
    close(stats.entropy, -(ref.weights * logs).sum(-1), atol=5e-6)
    largest = np.where(
        ref.weights.max(-1) > 0, ref.lse + np.log(ref.weights.max(-1).clip(1e-300)), -np.inf
    )
    np.testing.assert_allclose(stats.max_logit, largest, rtol=1e-5, atol=1e-6)


def test_a13_two_halves_of_the_keys_merge_by_lse(path, rng):
    q, k, v = normals(rng, (5, 2, 3), (8, 2, 3), (8, 2, 4))
    mask = np.ones((5, 8), bool)
    mask[1, :4], mask[2, 4:], mask[3] = False, False, False
    halves = [
        aj.attend_with_stats(q, k[part], v[part], mask=mask[:, part], **path)
        for part in (slice(0, 4), slice(4, 8))
    ]
    total = np.logaddexp(*(np.asarray(stats.lse) for _, stats in halves))
    merged = sum(
        np.asarray(out) * np.exp(stats.lse - np.where(np.isfinite(total), total, 0)).T[:, :, None]
        for out, stats in halves
    )
    whole, stats = aj.attend_with_stats(q, k, v, mask=mask, **path)
    close(merged, whole)
    np.testing.assert_allclose(total, stats.lse, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 8), (8, 8), (1, 8)])
def test_a13_a_mask_for_other_lengths_is_an_error(attend, shape):
    x = np.ones((5, 1, 2), np.float32)
    with pytest.raises(ValueError, match="mask"):
        attend(x, x, x, mask=np.ones(shape, bool))


@pytest.mark.parametrize(("N", "K"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_a14_heads_are_grouped_in_order(attend, N, K):
    q, k = np.ones((3, N, 2), np.float32), np.ones((5, K, 2), np.float32)
    v = np.broadcast_to(np.arange(K, dtype=np.float32)[:, None], (5, K, 1))
    out = np.asarray(attend(q, k, v))[:, :, 0]
    np.testing.assert_allclose(out, np.broadcast_to(np.arange(N) // (N // K), (3, N)), rtol=1e-6)


@pytest.mark.parametrize(("N", "K"), [(4, 3), (3, 2), (2, 4)])
def test_a14_heads_that_do_not_divide_are_refused(attend, N, K):
    q, k = np.ones((3, N, 2), np.float32), np.ones((5, K, 2), np.float32)
    with pytest.raises(ValueError, match=f"(?s)(?=.*{N})(?=.*{K})"):
        attend(q, k, k)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3, 2.0])
def test_a15_the_scale_is_that_of_a_head(attend, rng, heads, scale):
    width = 16
    x, y = normals(rng, (5, width), (6, width))
    q, k = aj.heads.split_heads(x, heads), aj.heads.split_heads(y, heads)
    score = None if scale is None else aj.scores.scaled_dot(scale)
    out = attend(q, k, k, score=score)
    used = (width / heads) ** -0.5 if scale is None else scale
    close(out, reference_attention(q, k, k, scale=used).out)
    close(aj.attention_weights(q, k, score=score), reference_attention(q, k, k, scale=used).weights)


def test_a15_one_scale_a_head(attend, backed, rng):
    q, k, v = normals(rng, (5, 4, 3), (6, 2, 3), (6, 2, 3))
    scale = np.array([0.1, 1.0, -2.0, 0.0], np.float32)
    expected = reference_attention(q, k, v, scale=scale).out
    d_out = rng.normal(size=expected.shape).astype(np.float32)
    out, (got,) = backed(lambda s: attend(q, k, v, score=aj.scores.scaled_dot(s)))(d_out, scale)
    close(out, expected)
    close(got, reference_gradients(q, k, v, d_out, scale=scale).params["scale"], atol=5e-6)
