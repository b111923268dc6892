"""Position biases and their gradients against float64 definitions, in every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.positions import alibi, alibi_slopes, relative_bias, shaw, transformer_xl
from attention_jax.positions.relative import bucket_starts
from attention_jax.testing import reference_attention, reference_gradients

pytestmark = pytest.mark.thorough

N, K, H, V = 4, 2, 6, 3
T, S = 9, 13
PATHS = {
    "dense": {"implementation": "dense"},
    "blockwise": {"implementation": "blockwise", "block_size": (4, 5)},
    "flash": {"implementation": "flash", "block_size": (4, 5)},
}
# what a cache's decoder, a packed row and a shuffled one have; the first are the default
SHUFFLED = np.array([0, 2, 1, 3, 4, 5, 50, 6, 800, 8, 9, 10, 3])
POSITIONS = {
    "default": (None, None),
    "offset": (np.arange(100, 100 + T), np.arange(98, 98 + S)),
    "any": (
        np.array([[3, 3, 0, 900, 7, 8, 9, 2, 1], np.arange(T) + 1]),
        SHUFFLED,
    ),
    "one side": (np.arange(T) + 1, SHUFFLED),
}


def t5_bucket(relative, bidirectional, buckets, max_distance):
    """As in the authors' code, in float64."""
    bucket = np.zeros_like(relative)
    n = -relative
    if bidirectional:
        buckets //= 2
        bucket = bucket + (n < 0) * buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    exact = buckets // 2
    with np.errstate(divide="ignore"):
        large = np.log(n / exact) / np.log(max_distance / exact) * (buckets - exact)
    large = exact + np.floor(np.where(n < exact, 0, large) + 1e-9).astype(int)
    return bucket + np.where(n < exact, n, np.minimum(large, buckets - 1))


def distances(which):
    q, k = (
        np.broadcast_to(np.arange(n) if x is None else x, (2, n))
        for x, n in zip(POSITIONS[which], (T, S), strict=True)
    )
    return (k[:, None, :] - q[:, :, None])[:, None]  # [B, 1, T, S]


def numbers(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def heads_of(parameter, rank):
    """float64 `[N, ...]`."""
    parameter = np.asarray(parameter, np.float64)
    own = parameter.shape[parameter.ndim - rank :]
    return np.broadcast_to(parameter, (N, *own))


def shaw_oracle(query, key, distance, table):
    k = table.shape[-2] // 2
    rows = heads_of(table, 2)[:, k + np.clip(distance[:, 0], -k, k)]  # [N, B, T, S, H]
    return np.einsum("btnh,nbtsh->bnts", query, rows) / np.sqrt(H)


def xl_oracle(query, key, distance, weight, u, v):
    features = weight.shape[-2]
    theta = 10_000.0 ** (-2 * np.arange((features + 1) // 2) / features)
    angles = -distance[:, 0, ..., None] * theta  # of position t minus position s
    waves = np.stack([np.sin(angles), np.cos(angles)], -1)
    waves = waves.reshape(*waves.shape[:-2], -1)[..., :features]
    r = np.einsum("btsd,ndh->nbtsh", waves, heads_of(weight, 2))
    keys = np.repeat(key, N // K, axis=2)
    content = np.einsum("nh,bsnh->bns", heads_of(u, 1), keys)[:, :, None]
    moved = query + heads_of(v, 1)
    return (content + np.einsum("btnh,nbtsh->bnts", moved, r)) / np.sqrt(H)


RNG = np.random.default_rng(3)
BIASES = {
    "alibi": (lambda: alibi(N), lambda q, k, d: -alibi_slopes(N)[:, None, None] * np.abs(d)),
    "t5": (
        lambda table: relative_bias(table, max_distance=20),
        lambda q, k, d, table: table[np.arange(N)[:, None, None], t5_bucket(d, True, 10, 20)],
        numbers(RNG, N, 10),
    ),
    "t5, one-sided": (
        lambda table: relative_bias(table, False, 6),
        lambda q, k, d, table: table[np.arange(N)[:, None, None], t5_bucket(d, False, 7, 6)],
        numbers(RNG, N, 7),
    ),
    "shaw": (shaw, shaw_oracle, numbers(RNG, 5, H)),
    "shaw, per head": (shaw, shaw_oracle, numbers(RNG, N, 3, H)),
    "transformer_xl": (
        transformer_xl,
        xl_oracle,
        numbers(RNG, 5, H),
        numbers(RNG, N, H),
        numbers(RNG, H),
    ),
}


def inputs():
    rng = np.random.default_rng(0)
    return [numbers(rng, 2, n, h, d) for n, h, d in ((T, N, H), (S, K, H), (S, K, V), (T, N, V))]


# What differs between biases is the block, not who asks for it: not all kernels for each
COMPILED = {
    "alibi": ("flash",),
    "shaw": ("blockwise", "flash"),
    "t5": ("dense", "flash"),
    "transformer_xl": ("flash",),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_bias_equals_its_definition_in_every_implementation(name):
    make, oracle, *parameters = BIASES[name]
    query, key, value, d_out = inputs()
    wide = [np.asarray(x, np.float64) for x in (query, key, *parameters)]

    def compiled(path):
        def run(q_at, k_at, query, value, *parameters):
            return aj.attend(
                query,
                key,
                value,
                bias=make(*parameters),
                mask=aj.masks.window(None, 2),
                query_positions=q_at,
                key_positions=k_at,
                **PATHS[path],
            )

        @jax.jit
        def both(q_at, k_at, *arguments):
            out, pull = jax.vjp(lambda *x: run(q_at, k_at, *x), *arguments)
            return out, pull(jnp.asarray(d_out))

        return both

    steps = [np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate(parameters)]
    wanted = {}
    for where in ("offset", "any", "one side"):
        bias = oracle(wide[0], wide[1], distances(where), *wide[2:])
        mask = distances(where) <= 2
        out = reference_attention(query, key, value, bias=bias, mask=mask).out
        exact = reference_gradients(query, key, value, d_out, bias=bias, mask=mask)
        # a table's gradient along a step: Σ d_bias · change, as the bias is linear in each table
        slopes = []
        for i, step in enumerate(steps):
            moved = [x + step if i == j else x for j, x in enumerate(wide[2:])]
            change = oracle(wide[0], wide[1], distances(where), *moved) - bias
            slopes.append((exact.bias * change).sum())
        wanted[where] = out, exact, slopes
    by_query = {}
    for path in COMPILED[name]:
        both = compiled(path)
        for where, (out, exact, slopes) in wanted.items():
            q_at, k_at = POSITIONS[where]
            q_at = jnp.broadcast_to(q_at, (2, T))
            got, (d_query, d_value, *d_tables) = both(q_at, k_at, query, value, *parameters)
            np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(d_value, exact.value, rtol=1e-4, atol=2e-5)
            for table, step, slope in zip(d_tables, steps, slopes, strict=True):
                np.testing.assert_allclose((table * step).sum(), slope, rtol=2e-4, atol=1e-4)
            if by_query.setdefault(where, d_query) is not d_query:
                np.testing.assert_allclose(d_query, by_query[where], rtol=1e-4, atol=2e-5)


def test_a21_slopes():
    def powers(*exponents):
        return [2.0**-e for e in exponents]

    assert alibi_slopes(8).tolist() == powers(1, 2, 3, 4, 5, 6, 7, 8)
    assert alibi_slopes(6).tolist() == powers(2, 4, 6, 8, 1, 3)
    eight = powers(1, 2, 3, 4, 5, 6, 7, 8)
    np.testing.assert_allclose(alibi_slopes(12), eight + powers(0.5, 1.5, 2.5, 3.5))
    assert alibi_slopes(1).tolist() == powers(8)
    array = np.asarray(alibi(6).to_array(7, 7))
    assert array.shape == (6, 7, 7)
    assert np.all(np.diagonal(array, axis1=1, axis2=2) == 0)
    assert np.all(np.diff(array[:, 0]) < 0)


def test_a21_buckets_equal_the_authors_code():
    for bidirectional, buckets, most in ((True, 32, 128), (False, 32, 128), (False, 9, 50)):
        d = np.arange(-300, 300)
        bias = relative_bias(np.zeros((1, buckets), np.float32), bidirectional, most)
        np.testing.assert_array_equal(bias.bucket(d), t5_bucket(d, bidirectional, buckets, most))
        np.testing.assert_array_equal(bias.bucket(jnp.asarray(d)), bias.bucket(d))
    # boundaries that floating-point logarithms may round wrongly
    assert bucket_starts(16, 128) == (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)


@pytest.mark.parametrize("name", ["t5", "t5, one-sided", "alibi"])
def test_to_array(name):
    make, oracle, *parameters = BIASES[name]
    for where in ("default", "any"):
        q_at, k_at = POSITIONS[where]
        got = make(*parameters).to_array(T, S, query_positions=q_at, key_positions=k_at)
        want = oracle(None, None, distances(where), *parameters)
        assert got.shape == ((N, T, S) if where == "default" else (2, N, T, S))
        np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, rtol=1e-6)


def test_to_array_of_empty_lengths_and_of_content_biases():
    assert alibi(3).to_array(0, 4).shape == (3, 0, 4)
    assert relative_bias(BIASES["t5"][2]).to_array(3, 0).shape == (N, 3, 0)
    with pytest.raises(TypeError, match="depends on the query"):
        shaw(np.zeros((3, H), np.float32)).to_array(T, S)


@pytest.mark.parametrize("name", ["shaw", "shaw, per head"])
def test_a_score_plus_shaw_called_directly(name):
    query, key, *_ = inputs()
    table = BIASES[name][2]
    got = (aj.scores.scaled_dot() + shaw(table))(query, key)
    keys = np.repeat(key, N // K, axis=2)
    want = np.einsum("btnh,bsnh->bnts", query, keys) / np.sqrt(H)
    want = want + shaw_oracle(query, key, distances("default"), table)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_decoding_step_equals_the_row_of_the_full_pass():
    query, key, value, _ = inputs()
    for name in ("alibi", "t5", "shaw", "transformer_xl"):
        make, _, *parameters = BIASES[name]
        bias = make(*parameters)
        whole = aj.attend(query, key[:, :T], value[:, :T], bias=bias, mask=aj.masks.causal())
        # cache entries after the step are masked, even if NaN
        step = aj.attend(
            query[:, 5:6],
            np.where(np.arange(S)[:, None, None] > 5, np.nan, key),
            value,
            bias=bias,
            mask=aj.masks.causal(),
            query_positions=np.array([5]),
        )
        np.testing.assert_allclose(step[:, 0], whole[:, 5], rtol=1e-5, atol=1e-5)


def test_half_precision_distant_positions_and_vmap():
    query, key, value, _ = inputs()
    table = BIASES["shaw"][2]
    low = [jnp.asarray(x).astype(jnp.bfloat16) for x in (query, key, value, table)]

    def run(bias, query, key, value, path):
        return aj.attend(query, key, value, bias=bias, **PATHS[path])

    out = run(shaw(low[3]), *low[:3], "flash")
    assert out.dtype == jnp.bfloat16
    exact = run(shaw(table), query, key, value, "dense")
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=0.05)
    # positions differ inside the batch that vmap adds: far, near and shuffled blocks in one step
    q_at = np.stack([np.arange(T), 10_000 + np.arange(T), np.arange(T)[::-1]])
    table = BIASES["t5"][2]

    def at(q_at, table, implementation):
        return aj.attend(
            query[0],
            key[0],
            value[0],
            bias=relative_bias(table, max_distance=20),
            query_positions=q_at,
            **PATHS[implementation],
        )

    def loss(table):
        return jnp.sum(jax.vmap(lambda p: at(p, table, "flash"))(q_at) ** 2)

    def plain(table):
        return sum(jnp.sum(at(p, table, "dense") ** 2) for p in q_at)

    (value_a, grad_a), (value_b, grad_b) = (
        jax.jit(jax.value_and_grad(f))(table) for f in (loss, plain)
    )
    np.testing.assert_allclose(value_a, value_b, rtol=1e-5)
    np.testing.assert_allclose(grad_a, grad_b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: alibi(3), ValueError, r"alibi\(3\) has 3 slopes but the query has N = 4"),
        (lambda: alibi(0), ValueError, "num_heads must be at least 1"),
        (lambda: relative_bias(np.zeros((3, 8), "f")), ValueError, r"\[N, buckets\] with N = 4"),
        (lambda: relative_bias(np.zeros((4, 3), "f")), ValueError, "3 buckets .* at least 4"),
        (lambda: relative_bias(np.zeros((4, 32), "f"), max_distance=8), ValueError, "above 8"),
        (lambda: relative_bias(np.zeros((4, 8), int)), TypeError, "table must be floating"),
        (lambda: relative_bias(np.zeros(8, "f")), ValueError, r"table must be \[N, buckets\]"),
        (lambda: shaw(np.zeros((4, H), "f")), ValueError, "odd number of rows"),
        (lambda: shaw(np.zeros((3, H + 1), "f")), ValueError, r"\[2k \+ 1, H\]"),
        (
            lambda: transformer_xl(np.zeros((5, H), "f"), np.zeros(2, "f"), np.zeros(H, "f")),
            ValueError,
            "u has shape",
        ),
    ],
)
def test_bias_mistakes(make, error, message):
    query, key, value, _ = inputs()
    with pytest.raises(error, match=message):
        aj.attend(query, key, value, bias=make())
