"""A size-1 axis of a mask or a bias means the same on every path."""

import jax
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.testing import reference_attention
from tests.engine.tools import close, corners, normals

SIZES = (2, 4, 3, 5)  # B N T S


@pytest.mark.parametrize("shape", corners(*SIZES), ids=str)
def test_a05_every_choice_of_axes(path, rng, shape):
    """The mask has the shape, the bias the opposite one: both go through all sixteen."""
    if path["implementation"] != "dense" and sum(n == 1 for n in shape) in (1, 3):
        shape = tuple(SIZES[i] if n == 1 else 1 for i, n in enumerate(shape))
    B, N, T, S = SIZES
    q, k, v = normals(rng, (B, T, N, 3), (B, S, 2, 3), (B, S, 2, 2))
    mask = rng.random(shape) < 0.7
    other = tuple(n if m == 1 else 1 for m, n in zip(shape, SIZES, strict=True))
    (bias,) = normals(rng, other)
    out = jax.jit(lambda *x: aj.attend(*x[:3], mask=x[3], bias=x[4], **path))(q, k, v, mask, bias)
    close(out, reference_attention(q, k, v, mask=mask, bias=bias).out)


def test_a05_key_padding_of_each_item(attend, rng):
    B, H, L, D = 4, 4, 32, 16
    q, k, v = normals(rng, (B, L, H, D), (B, L, H, D), (B, L, H, D), dtype=jax.numpy.bfloat16)
    lengths = np.array([1, 9, 17, 31])
    narrow = (np.arange(L) < lengths[:, None])[:, None, None, :]
    wide = np.broadcast_to(narrow, (B, H, L, L))
    expected = reference_attention(q, k, v, mask=wide).out
    for mask in (narrow, wide, aj.masks.padding(lengths)):
        out = jax.jit(lambda q, k, v, m=mask: attend(q, k, v, mask=m))(q, k, v)
        close(out, expected, 2e-2, 2e-2)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 3, 5), (1, 5), ()])
def test_a05_leading_axes_may_be_left_out(attend, rng, shape):
    B, N, T, S = SIZES
    q, k, v = normals(rng, (B, T, N, 3), (B, S, 2, 3), (B, S, 2, 2))
    mask = np.asarray(rng.random(shape) < 0.7)
    close(attend(q, k, v, mask=mask), reference_attention(q, k, v, mask=mask).out)


@pytest.mark.parametrize("shape", [(4,), (2, 5), (3, 1, 3, 5), (2, 4, 3, 6), (1, 2, 4, 3, 5)])
def test_a05_what_does_not_broadcast_is_named(attend, rng, shape):
    B, N, T, S = SIZES
    q, k, v = normals(rng, (B, T, N, 3), (B, S, 2, 3), (B, S, 2, 2))
    for name, x in (("mask", np.ones(shape, bool)), ("bias", np.ones(shape, np.float32))):
        with pytest.raises(ValueError, match=name) as error:
            attend(q, k, v, **{name: x})
        assert all(str(n) in str(error.value) for n in shape)
