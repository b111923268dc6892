"""Dropout: asked for or absent, independent for each pair, the same on every path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.plan import KERNELS
from attention_jax.testing import reference_attention
from tests.engine.tools import close, normals


def kept_entries(keys=64, queries=16, batch=2, heads=2, rate=0.5, seed=0, **request):
    """Which weights were kept, `[B, N, T, S]`, and all that were: uniform over one-hot values."""
    q, k = np.zeros((batch, queries, heads, 1), np.float32), np.zeros((batch, keys, heads, 1))
    v = np.broadcast_to(np.eye(keys, dtype=np.float32)[:, None], (batch, keys, heads, keys))
    out = jax.jit(
        lambda q, k, v, key: aj.attend(q, k, v, dropout_rate=rate, dropout_key=key, **request)
    )(q, k.astype(np.float32), v, jax.random.key(seed))
    weights = np.moveaxis(np.asarray(out), -2, -3)
    np.testing.assert_allclose(weights[weights != 0], 1 / keys / (1 - rate), rtol=1e-5)
    return weights != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a18_the_rate_and_the_scale_of_what_is_kept(path, rate):
    kept = kept_entries(rate=rate, **path)
    sigma = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma
    # Neither a row, a column, a head nor an item is off.
    for axis in range(4):
        rest = tuple(i for i in range(4) if i != axis)
        share = kept.mean(axis=rest)
        assert np.all(np.abs(share - (1 - rate)) < 5 * sigma * np.sqrt(kept.shape[axis]))


def test_a18_entries_are_independent(path):
    first, second = kept_entries(seed=0, **path), kept_entries(seed=1, **path)
    np.testing.assert_array_equal(first, kept_entries(seed=0, **path))
    for axis in range(4):
        for distance in (1, 2, 7):
            if distance >= first.shape[axis]:
                continue
            a = np.take(first, range(first.shape[axis] - distance), axis)
            b = np.take(first, range(distance, first.shape[axis]), axis)
            assert abs((a == b).mean() - 0.5) < 5 * 0.5 / np.sqrt(a.size), (axis, distance)
    assert abs((first == second).mean() - 0.5) < 5 * 0.5 / np.sqrt(first.size)


def test_a18_the_mask_is_the_same_on_every_path():
    """Whatever computes it, in blocks of any size, under remat and in half precision."""
    kept = kept_entries(implementation="dense")
    for name in sorted({"blockwise", "flash"} & set(KERNELS)):
        for block in (5, (16, 64), 100):
            again = kept_entries(implementation=name, block_size=block)
            np.testing.assert_array_equal(again, kept)


def test_a18_the_mask_goes_by_position(attend, rng):
    """A decode step, and a slice of the keys, drop what the whole call drops there."""
    q, k, v = normals(rng, (2, 6, 2, 3), (2, 8, 2, 3), (2, 8, 2, 3))
    drop = {"dropout_rate": 0.4, "dropout_key": jax.random.key(5)}
    whole = attend(q, k, v, **drop)
    late = attend(q[:, 4:], k, v, query_positions=np.arange(4, 6), **drop)
    close(late, whole[:, 4:])
    mask = np.arange(8) >= 3
    some = attend(q, k[:, 3:], v[:, 3:], key_positions=np.arange(3, 8), **drop)
    close(some, attend(q, k, v, mask=mask, **drop))


def test_a16_statistics_and_weights_are_those_before_dropout(path, rng):
    q, k, v = normals(rng, (2, 6, 2, 3), (2, 8, 2, 3), (2, 8, 2, 3))
    drop = {"dropout_rate": 0.4, "dropout_key": jax.random.key(5)}
    out, stats = aj.attend_with_stats(q, k, v, **drop, **path)
    plain_out, plain = aj.attend_with_stats(q, k, v, **path)
    for a, b in zip(stats, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert not np.allclose(out, plain_out)
    close(aj.attend(q, k, v, **drop, **path), out)


def test_a16_rows_of_weights_sum_to_one_or_zero(rng):
    q, k = normals(rng, (2, 6, 2, 3), (2, 8, 2, 3))
    mask = rng.random((2, 2, 6, 8)) < 0.3
    total = np.asarray(aj.attention_weights(q, k, mask=mask)).sum(-1)
    np.testing.assert_allclose(total, mask.any(-1), rtol=1e-6)


def test_a16_one_key_weighs_one_and_its_output_is_dropped(attend):
    q, k = np.ones((50, 1, 2), np.float32), np.ones((1, 1, 2), np.float32)
    v = np.ones((1, 1, 1), np.float32)
    assert np.all(np.asarray(aj.attention_weights(q, k)) == 1)
    out = np.asarray(attend(q, k, v, dropout_rate=0.2, dropout_key=jax.random.key(0)))
    assert sorted(set(out.ravel().tolist())) == [0, 1.25]


def test_a17_dropout_is_asked_for_in_full(attend, rng):
    q, k, v = normals(rng, (2, 5, 1, 3), (2, 5, 1, 3), (2, 5, 1, 3))
    with pytest.raises(ValueError, match="dropout_key"):
        attend(q, k, v, dropout_rate=0.1)
    plain = attend(q, k, v)
    for seed in (0, 1):
        same = attend(q, k, v, dropout_rate=0.0, dropout_key=jax.random.key(seed))
        np.testing.assert_array_equal(same, plain)
    for rate in (1.0, -0.1, 1.5, np.nan):
        with pytest.raises(ValueError, match="dropout_rate"):
            attend(q, k, v, dropout_rate=rate, dropout_key=jax.random.key(0))
    with pytest.raises(TypeError, match="deterministic"):
        attend(q, k, v, deterministic=True)


@pytest.mark.parametrize("rate", [1e-9, 0.999])
def test_a17_rates_near_the_ends(attend, rng, rate):
    q, k, v = normals(rng, (2, 5, 1, 3), (2, 5, 1, 3), (2, 5, 1, 3))
    out = attend(q, k, v, dropout_rate=rate, dropout_key=jax.random.key(0))
    assert np.isfinite(out).all()
    if rate < 0.5:
        close(out, reference_attention(q, k, v).out)


def test_a18_the_backward_pass_drops_what_the_forward_dropped(attend, backed, rng):
    """out is linear in the values, so its pullback must be the transpose of the same map."""
    q, k, v = normals(rng, (5, 2, 3), (7, 2, 3), (7, 2, 4))
    (d_out,) = normals(rng, (5, 2, 4))
    drop = {"dropout_rate": 0.5, "dropout_key": jax.random.key(1)}
    out, (d_value,) = backed(lambda v: attend(q, k, v, **drop))(d_out, v)
    close(jnp.vdot(out, d_out), jnp.vdot(d_value, v), rtol=1e-4)
