"""Every path a case can take: the kernels, at block sizes that divide nothing."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.plan import KERNELS

PATHS: dict[str, dict[str, Any]] = {
    "dense": {"implementation": "dense"},
    "blockwise": {"implementation": "blockwise", "block_size": (3, 4)},
    "flash": {"implementation": "flash", "block_size": (3, 4)},
}


@pytest.fixture(params=[name for name in PATHS if name in KERNELS])
def path(request):
    """What names the path in a call: implementation and block size."""
    return PATHS[request.param]


@pytest.fixture(params=[name for name in PATHS if name in KERNELS and name != "dense"])
def blocked(request):
    """The name of a kernel that works in blocks."""
    return request.param


@pytest.fixture
def attend(path):
    """`attend` on one path."""
    return partial(aj.attend, **path)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def sees(attend):
    """Who sees whom, `[T, S]`: equal scores, and values that are one-hot."""

    def visible(T, S, **request):
        value = np.eye(S, dtype=np.float32)[:, None, :]
        query, key = np.zeros((T, 1, 2), np.float32), np.zeros((S, 1, 2), np.float32)
        out = jax.jit(lambda q, k, v: attend(q, k, v, **request))(query, key, value)
        return np.asarray(out)[:, 0, :] != 0

    return visible


@pytest.fixture
def backed():
    """`f(*arrays) -> out` compiled together with the gradients of all its arrays."""

    def compiled(f):
        def run(d_out, *arrays):
            out, pull = jax.vjp(f, *arrays)
            return out, pull(d_out)

        return jax.jit(run)

    return compiled
