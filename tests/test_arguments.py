"""Arguments that are wrong, that have two readings, or that have a dtype of 8 bits."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj

ROOT = Path(__file__).resolve().parents[1]
RNG = np.random.default_rng(0)

# Each raises ValueError or TypeError; chex's assertions and those of Python are switched off.
WRONG = """
import chex, numpy as np
chex.disable_asserts()
import attention_jax as aj

ones = lambda *shape: np.ones(shape, np.float32)
q, k, v = ones(2, 3, 4, 8), ones(2, 3, 4, 8), ones(2, 3, 2, 1)
sq = aj.subquadratic
calls = {
    "heads of values": lambda: aj.attend(q, k, v),
    "length of values": lambda: aj.attend(q, k, ones(2, 5, 4, 8)),
    "batch of keys": lambda: aj.attend(q, ones(1, 3, 4, 8), k),
    "batch of values": lambda: aj.attend(q, k, ones(3, 3, 4, 8)),
    "heads that are no multiple": lambda: aj.attend(q, ones(2, 3, 3, 8), ones(2, 3, 3, 8)),
    "depths": lambda: aj.attend(q, ones(2, 3, 4, 7), k),
    "ranks": lambda: aj.attend(q, k[0], k[0]),
    "statistics": lambda: aj.attend_with_stats(q, k, v),
    "weights": lambda: aj.attention_weights(q, ones(2, 3, 3, 8)),
    "plan": lambda: aj.explain(q, k, v),
    "linear": lambda: sq.linear_attention(q, k, v),
    "nystrom": lambda: sq.nystrom_attention(q, k, v),
    "routed": lambda: sq.routed_attention(q, k, v, block_size=2, num_blocks=1),
    "low rank": lambda: sq.low_rank_attention(q, k, v, ones(2, 3), ones(2, 3)),
    "compressed": lambda: sq.memory_compressed_attention(q, k, v, 2),
    "divergence": lambda: aj.distillation.attention_divergence((q, k), (q[:1], k[:1])),
    "cache": lambda: aj.cache.KVCache.init(2, 4, 2, 8).append(ones(2, 1, 3, 8), ones(2, 1, 3, 8)),
    "bias": lambda: aj.attend(q, k, k, bias=ones(5, 3)),
    "mask": lambda: aj.attend(q, k, k, mask=np.ones((5, 3), bool)),
    "positions": lambda: aj.attend(q, k, k, query_positions=np.arange(4)),
    "heads to split": lambda: aj.heads.split_heads(ones(2, 3, 9), 2),
}
for name, call in calls.items():
    try:
        call()
    except (TypeError, ValueError) as error:
        if not str(error):
            raise SystemExit(f"{name}: no text")
    else:
        raise SystemExit(f"{name}: accepted")
print("refused", len(calls))
"""


@pytest.mark.parametrize("options", [[], ["-O"]], ids=["plain", "-O"])
def test_wrong_arguments_are_refused_without_assertions(options):
    done = subprocess.run(
        [sys.executable, *options, "-c", WRONG], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused")


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_a_mask_of_three_axes_with_two_readings_is_refused():
    query, key, mask = normal(2, 3, 2, 4), normal(2, 3, 2, 4), RNG.random((2, 3, 3)) < 0.7
    mask |= np.eye(3, dtype=bool)
    words = r"mask\[:, None\] .* mask\[None\] for a mask of each head"
    for wrong in (mask, aj.masks.from_array(mask), aj.masks.causal() & aj.masks.from_array(mask)):
        for call in (aj.attend, aj.attend_with_stats, aj.explain):
            with pytest.raises(ValueError, match=words):
                call(query, key, key, mask=wrong)
        with pytest.raises(ValueError, match=words):
            aj.attention_weights(query, key, mask=wrong)
    with pytest.raises(ValueError, match=words):
        aj.subquadratic.linear_attention(query, key, key, mask=mask[:, :1])
    by_example, by_head = (
        aj.attend(query, key, key, mask=m, implementation="dense")
        for m in (mask[:, None], mask[None])
    )
    for example in range(2):
        alone = aj.attend(query[example], key[example], key[example], mask=mask[example])
        np.testing.assert_allclose(by_example[example], alone, atol=1e-6)
        head = (slice(None), slice(None), slice(example, example + 1))
        alone = aj.attend(query[head], key[head], key[head], mask=mask[example])
        np.testing.assert_allclose(by_head[head], alone, atol=1e-6)


def test_masks_with_one_reading_are_taken():
    query, key = normal(2, 3, 2, 4), normal(2, 3, 2, 4)
    for shape in ((1, 3, 3), (3, 3), (2, 1, 3, 3), (1, 2, 3, 3)):
        aj.attend(query, key, key, mask=np.ones(shape, bool))
    aj.attend(
        normal(3, 4, 2, 4), normal(3, 4, 2, 4), normal(3, 4, 2, 4), mask=np.ones((2, 4, 4), bool)
    )
    aj.attend(query[0], key[0], key[0], mask=np.ones((2, 3, 3), bool))


FLOAT8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda d: d.__name__)
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_float8_keys_and_values_are_computed_in_float32(dtype, implementation):
    query = jnp.asarray(normal(2, 5, 4, 8)).astype(jnp.bfloat16)
    key, value = (jnp.asarray(normal(2, 7, 2, 8)).astype(dtype) for _ in range(2))

    @jax.jit
    def run(query, key, value):
        def loss(*arrays):
            options = {"mask": aj.masks.causal(), "implementation": implementation}
            out, stats = aj.attend_with_stats(*arrays, **options)
            return out.astype(jnp.float32).sum() + stats.lse.sum(), (out, stats.entropy)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(query, key, value)

    (_, (out, entropy)), gradients = run(query, key, value)
    wide = [x.astype(jnp.float32) for x in (key, value)]
    (_, (wanted, wanted_entropy)), wanted_gradients = run(query, *wide)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in gradients] == [jnp.bfloat16, dtype, dtype]
    np.testing.assert_array_equal(out.astype(np.float32), wanted.astype(np.float32))
    np.testing.assert_allclose(entropy, wanted_entropy, rtol=1e-6)
    for got, full in zip(gradients, wanted_gradients, strict=True):
        full = full.astype(got.dtype).astype(np.float32)
        np.testing.assert_allclose(got.astype(np.float32), full, rtol=0.07, atol=0.07)


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda d: d.__name__)
def test_float8_in_caches_weights_families_and_divergences(dtype):
    query = jnp.asarray(normal(2, 7, 4, 8))
    key, value = (jnp.asarray(normal(2, 7, 2, 8)).astype(dtype) for _ in range(2))
    wide = [x.astype(jnp.float32) for x in (key, value)]
    cache = aj.cache.KVCache.init((2,), 9, 2, 8, dtype=dtype).append(key, value)
    sq = aj.subquadratic
    calls = [
        lambda k, v: aj.attend(query[:, :1], k, v),  # a step of decoding
        lambda k, v: aj.attention_weights(query, k),
        lambda k, v: sq.linear_attention(query, k, v),
        lambda k, v: sq.nystrom_attention(query, k, v, num_landmarks=3),
        lambda k, v: sq.routed_attention(query, k, v, block_size=3, num_blocks=2),
        lambda k, v: aj.distillation.attention_divergence((query, k), (query + 1, k)),
    ]
    for call in calls:
        np.testing.assert_allclose(call(key, value), call(*wide), rtol=1e-5, atol=1e-6)
    out = aj.attend(query, cache.key, cache.value, mask=cache.mask())
    np.testing.assert_allclose(out, aj.attend(query, *wide), rtol=1e-5, atol=1e-6)
    low = aj.attend(query.astype(dtype), key, value)
    assert low.dtype == dtype
    wanted = aj.attend(query.astype(dtype).astype(jnp.float32), *wide).astype(dtype)
    np.testing.assert_allclose(low.astype(np.float32), wanted.astype(np.float32), rtol=0.13)
