"""What several cases need: random arrays, and the comparison."""

import itertools

import numpy as np


def normals(rng, *shapes, dtype=np.float32):
    """Standard normal arrays."""
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def close(got, expected, rtol=1e-5, atol=2e-6):
    """The two agree entry by entry, in value and in shape; atol in units of the largest entry."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    atol *= max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


def corners(*axes):
    """All choices of size 1 or the full size, axis by axis."""
    return list(itertools.product(*((1, n) for n in axes)))
