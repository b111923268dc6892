"""The gradient keeps nothing of the size of all pairs; its memory grows with the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import attention_jax as aj

L, D, BLOCK = 1024, 16, 64
# Nothing of size L·L, nor of L·(number of blocks)·D.
LIMIT = L * (L // BLOCK) * D // 2


def sizes(jaxpr):
    """The size of every array in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        for v in equation.outvars:
            if hasattr(v.aval, "shape"):
                yield int(np.prod(v.aval.shape)), f"{equation.primitive.name} {v.aval}"
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def additive():
    rng = np.random.default_rng(0)
    return aj.scores.additive(
        *(rng.normal(size=s).astype(np.float32) for s in ((D, 4), (D, 4), (4,)))
    )


REQUESTS = {
    "plain": lambda L: {},
    "causal": lambda L: {"mask": aj.masks.causal()},
    "lengths": lambda L: {"mask": aj.masks.padding(jnp.array(L - 5)) & aj.masks.window(99, 7)},
    "segments": lambda L: {"mask": aj.masks.segments(jnp.arange(L) // 100)},
    "bias": lambda L: {"bias": jnp.ones((L,), jnp.float32), "mask": aj.masks.causal()},
    "dropout": lambda L: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
    "additive": lambda L: {"score": additive()},
}


def loss(blocked, stats, name, L, block=BLOCK):
    request = REQUESTS[name](L)

    def f(q, k, v):
        how = {"implementation": blocked, "block_size": block, **request}
        if not stats:
            return aj.attend(q, k, v, **how).sum()
        out, found = aj.attend_with_stats(q, k, v, **how)
        return out.sum() + found.lse.sum() + found.entropy.sum()

    return jax.grad(f, argnums=(0, 1, 2))


@pytest.mark.parametrize(
    ("name", "stats"), [*((name, False) for name in REQUESTS), ("plain", True), ("causal", True)]
)
def test_a33_no_array_of_all_pairs(blocked, name, stats):
    x = jax.ShapeDtypeStruct((L, 1, D), jnp.float32)
    jaxpr = jax.make_jaxpr(loss(blocked, stats, name, L))(x, x, x)
    largest, where = max(sizes(jaxpr.jaxpr))
    assert largest < LIMIT, where


def test_a33_dense_would_be_found():
    x = jax.ShapeDtypeStruct((L, 1, D), jnp.float32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda q: aj.attend(q, q, q, implementation="dense").sum()))(x)
    assert max(sizes(jaxpr.jaxpr))[0] >= L * L


@pytest.mark.parametrize("name", ["causal", "dropout", "additive"])
def test_a33_temporaries_grow_with_the_length(blocked, name):
    def temporaries(L):
        x = jax.ShapeDtypeStruct((L, 1, D), jnp.float32)
        compiled = jax.jit(loss(blocked, False, name, L)).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    once, twice = temporaries(L), temporaries(2 * L)
    assert twice < 3 * once
    assert twice < 4 * (2 * L) ** 2  # bytes of one float32 array of all pairs


def test_a33_building_a_mask_costs_nothing_of_all_pairs():
    n = 1_000_000
    block_map = aj.masks.window(256, 0).block_map(n, n, 4096)
    assert block_map.kinds.size == (-(-n // 4096)) ** 2
