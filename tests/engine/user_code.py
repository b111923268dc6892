"""A state that a caller's functions read, and what must hold of every call of such a function."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np


class State:
    """What a caller's functions read, and what may change between two calls."""

    def __init__(self, n=1, w=1.0):
        self.n, self.w = n, w

    def see(self, q, k):
        return (k <= q) & (q - k < self.n)

    def score(self, q, k, t, s):
        return self.w * (q @ k.T)

    def features(self, x):
        return jax.nn.elu(x * self.w) + 1

    def activation(self, x):
        return jnp.tanh(x) * self.w

    def loss(self, x):
        return self.w * jnp.sum(x * x)


def check_reads_and_lets_go(make):
    """`make(state)` is a function of no arguments."""
    state = State()
    call = make(state)
    before = np.asarray(call())
    state.n, state.w = 3, 2.0
    assert not np.allclose(before, call())
    state.n, state.w = 1, 1.0
    np.testing.assert_array_equal(call(), before)
    kept = weakref.ref(state)
    del state, call
    gc.collect()
    assert kept() is None
