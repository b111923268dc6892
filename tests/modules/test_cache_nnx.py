"""Multi-head attention over a cache: step t is row t of the full causal pass (case A22)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import nnx as modules
from attention_jax.nnx import MultiHeadAttention

T, LENGTH, WIDTH = 7, 9, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, WIDTH)), jnp.float32)
TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)


def _layer(**options):
    given = {
        "qkv_features": 16,
        "num_kv_heads": 2,
        "value_features": 12,
        "out_features": 5,
        **options,
    }
    return MultiHeadAttention(4, WIDTH, **given, rngs=nnx.Rngs(0))


def _decoded(layer, x, cache, valid=None):
    """A prompt in two chunks, then token by token."""
    first, cache = layer.with_cache(x[:, :3], cache, valid=None if valid is None else valid[:, :3])
    second, cache = layer.with_cache(x[:, 3:4], cache)

    def step(cache, token):
        out, cache = layer.with_cache(token[:, None], cache)
        return cache, out[:, 0]

    cache, rest = jax.lax.scan(step, cache, jnp.swapaxes(x[:, 4:], 0, 1))
    return jnp.concatenate([first, second, jnp.swapaxes(rest, 0, 1)], 1), cache


@nnx.jit
def _both(layer, x, cache, valid):
    """The full causal pass, and decoding with the second example behind two columns of padding."""
    padded = jnp.concatenate([jnp.full_like(x[1:, :2], jnp.nan), x[1:, :5]], 1)
    return layer(x, is_causal=True), _decoded(layer, x.at[1:].set(padded), cache, valid)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "rotary", "mask": aj.masks.causal(), "score": "general"},
        {"positions": modules.rotary(100.0, 0.5, True), "score": "additive", "num_kv_heads": 1},
        {"positions": aj.positions.relative_bias(TABLE, max_distance=8), "score": "cosine"},
        {"positions": "shaw", "mask": aj.masks.window(2, None), "num_kv_heads": 4},
    ],
    ids=lambda options: str(options.get("positions"))[:20],
)
def test_step_t_is_row_t_of_the_full_pass(options):
    layer = _layer(**options)
    valid = jnp.arange(T)[None] >= jnp.array([[0], [2]])
    full, decoded = _both(layer, X, layer.new_cache(2, LENGTH), valid)
    np.testing.assert_allclose(decoded[0], full[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(decoded[1, 2:], full[1, :5], rtol=1e-4, atol=1e-5)
    assert full.shape == (2, T, 5)


def test_flax_s_own_way_to_decode():
    """`decode` and `init_cache`, under Flax's names; theirs gives the same numbers."""
    theirs = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=nnx.Rngs(0))
    ours = MultiHeadAttention(2, WIDTH, decode=True, mask=aj.masks.causal(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        ours(X)
    for layer in (theirs, ours):
        layer.init_cache((2, LENGTH, WIDTH))
    ours_has, theirs_has = (set(nnx.state(layer, nnx.Cache)) for layer in (ours, theirs))
    assert theirs_has == {"cached_key", "cached_value", "cache_index"} < ours_has
    step = nnx.jit(lambda layer, x: layer(x))
    full = nnx.jit(lambda layer: layer(X, decode=False))(ours)
    for t in range(4):
        out = step(ours, X[:, t : t + 1])
        np.testing.assert_allclose(out, step(theirs, X[:, t : t + 1]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(out[:, 0], full[:, t], rtol=1e-5, atol=1e-5)
    again = MultiHeadAttention(2, WIDTH, decode=True, rngs=nnx.Rngs(0))
    again.init_cache((2, LENGTH, WIDTH))
    nnx.update(again, nnx.state(theirs, nnx.Cache))  # a checkpoint in the middle of a sentence
    np.testing.assert_allclose(again(X[:, 4:]), full[:, 4:], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours(X[:, 4:]), full[:, 4:], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(ours.cached_key[:, :4], theirs.cached_key[:, :4])
    assert int(ours.cache_index[...]) == T
    with pytest.raises(ValueError, match=r"3 more.*9.*7"):
        ours(X[:, :3])
    for _ in range(3):
        out = step(ours, X[:, :1])
    assert bool(jnp.isnan(out).all()), "the tenth token in a cache for nine"


def test_a_view_that_decodes():
    """`flax.nnx.view` sets what it sets in Flax's own module."""
    layer = MultiHeadAttention(2, WIDTH, dropout_rate=0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="max_length"):
        nnx.view(layer, decode=True)
    view = nnx.view(layer, deterministic=True, decode=True, batch_size=2, max_length=4)
    out = nnx.jit(lambda layer, x: layer(x))(view, X[:, :3])
    expected = nnx.jit(lambda layer, x: layer(x, is_causal=True, deterministic=True))(
        layer, X[:, :3]
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    assert int(view.cache_index[...]) == 3
    assert layer.cache_index is None


def test_a_rolling_cache_and_a_cache_that_is_full():
    layer = _layer(positions="rotary", mask=aj.masks.window(3, 0))
    full = nnx.jit(lambda layer: layer(X))(layer)
    small = layer.new_cache(2, 4, rolling=True)
    run = nnx.jit(_decoded)
    out, cache = run(layer, X, small)
    np.testing.assert_allclose(out, full, rtol=1e-4, atol=1e-5)
    assert int(cache.index) == T
    rows, again = [], layer.new_cache(2, 4, rolling=True)
    chunk = nnx.jit(lambda layer, x, cache: layer.with_cache(x, cache))
    for part in (slice(0, 2), slice(2, 5), slice(5, 7)):  # chunks that overwrite what they see
        row, again = chunk(layer, X[:, part], again)
        rows.append(row)
    np.testing.assert_allclose(jnp.concatenate(rows, 1), full, rtol=1e-4, atol=1e-5)
    assert cache.key.shape == (2, 4, 2, 4)
    out, _ = run(layer, X, layer.new_cache(2, 6))
    np.testing.assert_allclose(out[:, :6], full[:, :6], rtol=1e-4, atol=1e-5)
    assert bool(jnp.isnan(out[:, 6]).all())


def test_beams_that_change_places():
    """Case A23: one step after a reorder is a recomputation of the reordered prefixes."""
    layer = _layer(positions="alibi")
    x = jnp.concatenate([X, -X[:1]])
    order = np.array([2, 0, 0])

    @nnx.jit
    def run(layer, x):
        _, cache = layer.with_cache(x[:, :3], layer.new_cache(3, 5))
        out, _ = layer.with_cache(x[:, 3:4], cache.reorder(order))
        return out, layer(jnp.concatenate([x[order, :3], x[:, 3:4]], 1), is_causal=True)

    out, expected = run(layer, x)
    np.testing.assert_allclose(out[:, 0], expected[:, 3], rtol=1e-4, atol=1e-5)


def test_what_is_remembered_is_what_the_call_sees():
    layer = _layer(score="additive")
    lengths = jnp.array([7, 4])

    @nnx.jit
    def run(layer, x):
        query, mask = x[:, :3], aj.masks.padding(lengths)
        memory = layer.new_memory_cache(x, valid=jnp.arange(T)[None] < lengths[:, None])
        hidden = layer.with_memory_cache(query, layer.new_memory_cache(x), mask=mask)
        return layer(query, x, mask=mask), layer.with_memory_cache(query, memory), hidden

    expected, recalled, hidden = run(layer, X)
    np.testing.assert_allclose(recalled, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)


def test_fused_projections_are_the_same_function_of_the_same_parameters():
    options = {"normalize_qk": True, "positions": "rotary"}
    plain, fused = _layer(**options), _layer(**options, fused_qkv=True)
    assert str(nnx.state(plain)) == str(nnx.state(fused))

    def loss(layer, x):
        return jnp.sum(layer(x) ** 2)

    expected = nnx.jit(nnx.value_and_grad(loss))(plain, X)
    found = nnx.jit(nnx.value_and_grad(loss))(fused, X)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected
    )
    products = [str(jax.make_jaxpr(f)(X)).count("dot_general") for f in (plain, fused)]
    assert products[1] == products[0] - 2
    assert str(jax.make_jaxpr(fused)(X, X[:, :3])).count("dot_general") == products[0]


def test_positions_may_be_given():
    """Case A20: rows 5.. of one long call, whichever offset came first."""
    layer = _layer(positions="rotary")

    @nnx.jit
    def run(layer, x, queries, keys):
        return layer(x, x + 0, query_positions=queries, key_positions=keys, is_causal=True)

    @nnx.jit
    def crossed(layer, x):
        return layer(x[:, 5:], x, query_positions=jnp.arange(5, T), is_causal=True)

    at = jnp.stack([jnp.arange(T), jnp.arange(T) + 5])
    full, other, shifted = (
        run(layer, X, *each) for each in ((at, at), (at[::-1],) * 2, (at, at + 1))
    )
    np.testing.assert_allclose(full, layer(X, is_causal=True), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(other, full, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(crossed(layer, X), full[:, 5:], rtol=1e-4, atol=1e-5)
    assert not np.allclose(shifted, full)


def test_sown_weights():
    layer = _layer()
    _, sown = nnx.capture(lambda layer: layer(X, sow_weights=True), nnx.Intermediate)(layer)
    (weights,) = jax.tree.leaves(sown)
    expected = layer.attention_weights(X, mask=aj.masks.causal())
    layer.init_cache((2, LENGTH, WIDTH))
    look = nnx.capture(lambda layer: layer(X, decode=True, sow_weights=True), nnx.Intermediate)
    (slots,) = jax.tree.leaves(look(layer)[1])
    np.testing.assert_array_equal(weights, layer.attention_weights(X))
    np.testing.assert_allclose(slots[..., :T], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(slots[..., T:], 0)


def test_weights_sown_into_the_layer_itself():
    layer = _layer()
    expected = layer.attention_weights(X)
    layer(X, sow_weights=True)
    with pytest.warns(DeprecationWarning, match="capture"):  # Flax's own, about its older way
        layer(X, sow_weights=True)
    sown = nnx.pop(layer, nnx.Intermediate)["attention_weights"]
    assert len(sown) == 2
    np.testing.assert_array_equal(sown[1], expected)
    np.testing.assert_array_equal(layer.attention_weights(X), expected)


def _kept():
    layer = _layer(decode=True)
    layer.init_cache(X.shape)
    return layer


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: _layer(positions=modules.rotary(fraction=0.6)), ValueError, ["even", "0.6"]),
        (lambda: MultiHeadAttention(2, 6, positions="rotary", rngs=nnx.Rngs(0)), ValueError, ["3"]),
        (lambda: _layer(positions="absolute"), ValueError, ["'absolute'", "rotary", "shaw"]),
        (lambda: _layer(positions=3), TypeError, ["positions", "int"]),
        (lambda: modules.relative_bias(3), ValueError, ["3 buckets"]),
        (lambda: modules.shaw(-1), ValueError, ["max_distance", "-1"]),
        (lambda: _layer(value_features=6), ValueError, ["value_features 6", "num_heads 4"]),
        (lambda: _layer(fused_qkv=True, in_kv_features=4), ValueError, ["in_kv_features 4"]),
        (lambda: _layer(decode=True)(X), ValueError, ["init_cache"]),
        (lambda: _layer(decode=True)(X, X[:, :3]), ValueError, ["new_memory_cache"]),
        (lambda: _layer().new_cache(2, -3), ValueError, ["length", "-3"]),
        (
            lambda: _layer().with_cache(X, _layer().new_cache(3, 9)),
            ValueError,
            ["inputs have batch [2]", "cache [3]"],
        ),
        (lambda: _kept()(X[:1, :1]), ValueError, ["inputs_q has batch [1]", "cache [2]"]),
        (
            lambda: _layer().with_memory_cache(X[:1], _layer().new_memory_cache(X)),
            ValueError,
            ["inputs_q", "[1]"],
        ),
        (lambda: _layer().init_cache(6), TypeError, ["input_shape", "[*B, length, in", "6"]),
        (
            lambda: _layer().init_cache((2, 6, 99)),
            ValueError,
            ["input_shape", "8 features", "[2, 6, 99]"],
        ),
    ],
)
def test_bad_use(make, error, words):
    with pytest.raises(error) as raised:
        make()
    for word in words:
        assert word in str(raised.value)
