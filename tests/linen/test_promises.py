"""The promises of every module, in Linen: masks, dropout, starts, and what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import linen
from attention_jax.linen import AdditiveAttention, MultiHeadAttention, TransformerEncoderLayer
from tests.linen.tools import apply, init

B, T, D = 2, 6, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
CAUSAL = aj.masks.causal()


@pytest.mark.parametrize(("rate", "explicit"), [(0.0, True), (0.3, False)])
def test_no_option_costs_the_causal_mask(rate, explicit):
    """Case A08: the call, the statistics and the weights, with dropout and with a second mask."""
    layer = MultiHeadAttention(2, mask=CAUSAL, dropout_rate=rate, deterministic=False)
    # The call's mask hides key 0 from everybody but query 0, and only where it is given.
    mask = jnp.ones((T, T), bool).at[1:, 0].set(False) if explicit else None
    variables = init(layer, X)

    @jax.jit
    def run(x):
        def told(name, **options):
            method = getattr(layer, name)
            return layer.apply(variables, x, mask=mask, method=method, **options)

        rngs = {"rngs": {"dropout": jax.random.key(3)}}
        outs = told("__call__", **rngs), told("with_stats", **rngs)[0]
        return *outs, jnp.moveaxis(told("attention_weights"), -2, 1)

    before = run(X)
    for key in range(T):
        after = run(X.at[:, key].add(1.0))
        seen = np.arange(T) >= key
        if explicit and key == 0:
            seen = np.arange(T) == 0
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            changed = np.any(a != b, axis=(0, *range(2, a.ndim)))
            assert not np.any(changed & ~seen), (i, key)
            if rate == 0.0:
                assert np.all(changed[seen][1:]), (i, key)


def test_a_mask_is_boolean_and_a_bias_is_a_number():
    """Case A06."""
    layer = MultiHeadAttention(2)
    variables = init(layer, X)
    mask = jnp.tril(jnp.ones((T, T), bool))
    found = apply(layer, variables, X, mask=mask)
    hidden = apply(layer, variables, X, bias=jnp.where(mask, 0.0, -jnp.inf))
    np.testing.assert_allclose(found, hidden, rtol=1e-5, atol=1e-6)
    for bad in (mask.astype(jnp.float32), mask.astype(int)):
        with pytest.raises(TypeError, match="bias"):
            layer.apply(variables, X, mask=bad)
        with pytest.raises(TypeError, match="bias"):
            MultiHeadAttention(2, mask=bad)
    with pytest.raises(TypeError, match="mask"):
        layer.apply(variables, X, bias=mask)


@pytest.mark.parametrize("score", ["scaled_dot", "additive"])
def test_what_is_masked_does_not_matter_and_an_empty_row_is_the_bias(score):
    layer = MultiHeadAttention(
        2, score=score, normalize_qk=True, out_bias_init=nn.initializers.constant(2.0)
    )
    mask = aj.masks.padding(jnp.array([T, 0])) & CAUSAL
    variables = init(layer, X)

    def loss(variables, x):
        out = layer.apply(variables, x, mask=mask)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.grad(loss, has_aux=True))
    slope, out = run(variables, X)
    np.testing.assert_array_equal(out[1], jnp.full((T, D), 2.0))
    spoiled, other = run(variables, X.at[1].set(jnp.nan))
    np.testing.assert_array_equal(out[0], other[0])
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(spoiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_padding_that_is_no_number_spoils_nothing_though_it_looks_itself():
    layer = TransformerEncoderLayer(2, D, 8)
    mask, variables = jnp.arange(T) < 3, init(layer, X)

    def loss(variables, x):
        out = layer.apply(variables, x, mask[None, None, None])
        return jnp.sum(out[:, :3] * X[:, :3]), out[:, 3:]

    run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    spoiled, loud = run(variables, X.at[:, 3:].set(jnp.nan))
    assert np.isnan(loud).all()
    for a, b in zip(jax.tree.leaves(run(variables, X)[0]), jax.tree.leaves(spoiled), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_flags_of_dropout():
    """Cases A16, A17: the call's flag wins, evaluation needs no key, weights are undropped."""
    variables = init(MultiHeadAttention(1), X)
    plain = apply(MultiHeadAttention(1), variables, X)
    for constructed in (None, True, False):
        layer = MultiHeadAttention(1, dropout_rate=0.2, deterministic=constructed)
        for called in (None, True, False):
            decides = constructed if called is None else called
            flag = {"deterministic": called}
            if decides is None:
                with pytest.raises(ValueError, match="deterministic"):
                    layer.apply(variables, X, **flag)
            elif decides:
                np.testing.assert_array_equal(apply(layer, variables, X, **flag), plain)
            else:
                with pytest.raises(ValueError, match="dropout"):
                    layer.apply(variables, X, **flag)
                assert not np.allclose(apply(layer, variables, X, key=1, **flag), plain)
    with pytest.raises(TypeError, match="train"):
        layer.apply(variables, X, train=False)
    weights = apply(layer, variables, X, X[:, :1], method="attention_weights")
    np.testing.assert_array_equal(weights, 1.0)
    # A flag that is traced: no key is needed to evaluate, and training without one is loud.
    run = jax.jit(lambda flag: layer.apply(variables, X, deterministic=flag))
    np.testing.assert_allclose(run(True), plain, rtol=1e-6, atol=1e-6)
    assert np.isnan(run(False)).all()


def kept(broadcast):
    """Which weights are kept, `[B, N, T, S]`, read through values that are one-hot by key."""
    N, S = 2, 64
    layer = MultiHeadAttention(
        N,
        qkv_features=N * S,
        out_features=N * S,
        dropout_rate=0.5,
        broadcast_dropout=broadcast,
        deterministic=False,
        use_bias=False,
    )
    eye, zeros = jnp.eye(S), jnp.zeros((S, N, S))
    values = jnp.broadcast_to(eye[:, None], (S, N, S))
    out = jnp.eye(N * S).reshape(N, S, N * S)
    kernels = {"query": zeros, "key": zeros, "value": values, "out": out}
    variables = {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}
    states = jnp.broadcast_to(eye, (B, S, S))
    found = apply(layer, variables, jnp.ones((B, 16, S)), states, key=1)
    return np.moveaxis(np.asarray(found).reshape(B, 16, N, S), 2, 1) != 0


def test_dropout_is_independent_unless_it_is_shared():
    """Case A18."""
    own, shared = kept(False), kept(True)
    for axis in range(4):
        assert not np.array_equal(np.take(own, 0, axis), np.take(own, 1, axis)), axis
    assert abs(own.mean() - 0.5) < 4 * 0.5 / np.sqrt(own.size)
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:1, :1], shared.shape))


def test_projections_start_with_the_fan_of_a_matrix():
    """Case A27."""
    layer = MultiHeadAttention(8)
    params = init(layer, jnp.ones((1, 512)))["params"]
    for name in ("query", "key", "value", "out"):
        kernel = np.asarray(params[name]["kernel"])
        assert kernel.shape == ((8, 64, 512) if name == "out" else (512, 8, 64))
        assert abs(kernel.std() * np.sqrt(512) - 1) < 0.03


def test_a_score_may_be_drawn_by_a_function():
    rows = jnp.array([0, 2, 1, 1, 0, 2])

    def make(heads, depth, key):
        table = jax.random.normal(key, (3,))
        look = jax.tree_util.Partial(
            lambda table, rows, q, k, t, s: table[rows[s]][None] + jnp.zeros((t.shape[0], 1)),
            table,
            rows,
        )
        return aj.scores.custom(look)

    layer = MultiHeadAttention(2, score=make)
    variables = init(layer, X)
    (table,) = jax.tree.leaves(variables["params"]["score"])
    (numbers,) = jax.tree.leaves(variables["constants"])  # they do not train
    np.testing.assert_array_equal(numbers, rows)
    weights = apply(layer, variables, X, method="attention_weights")
    expected = jax.nn.softmax(table[rows])
    np.testing.assert_allclose(weights[0, 0], np.broadcast_to(expected, (T, T)), rtol=1e-5)
    with pytest.raises(TypeError, match=r"factory.*Score.*int"):
        init(MultiHeadAttention(2, score=lambda heads, depth, key: 1), X)


def test_wrong_arguments_are_told_at_construction():
    layer = MultiHeadAttention
    for make, words in (
        (lambda: layer(3, 8), ["qkv_features 8", "num_heads 3"]),
        (lambda: layer(6, 12, num_kv_heads=4), ["num_heads 6", "num_kv_heads 4"]),
        (lambda: layer(2, dropout_rate=1.0), ["dropout_rate", "[0, 1)"]),
        (lambda: layer(2, score="bilinear"), ["'bilinear'", "additive"]),
        (lambda: layer(2, positions="absolute"), ["'absolute'", "rotary"]),
        (lambda: layer(2, implementation="xla"), ["implementation", "'xla'", "'dense'"]),
        (lambda: linen.MeanAttention(D, implementation="xla"), ["implementation", "'xla'"]),
        (lambda: layer(2, 6, positions="rotary"), ["3"]),
        (lambda: layer(2, value_features=5), ["value_features 5", "num_heads 2"]),
        (lambda: layer(2, 8, in_kv_features=4, fused_qkv=True), ["fused_qkv", "8", "4"]),
        (lambda: AdditiveAttention(4, 4, 0), ["hidden_features", "0"]),
        (lambda: TransformerEncoderLayer(2, D, 16, norm="middle"), ["norm", "'middle'"]),
        (lambda: linen.TransformerDecoder(0, 2, D, 16), ["num_layers", "0"]),
        (lambda: linen.Transformer(1, 2, D, 16, 5, 5, positions="learned"), ["max_length"]),
        (
            lambda: linen.TransformerDecoderLayer(
                2, D, 16, cross_attention="mean", cross_score="dot"
            ),
            ["cross_score", "mean"],
        ),
        (
            lambda: linen.Transformer(1, 2, D, 16, 5, 6, share_embedding=True),
            ["source_vocab 5", "target_vocab 6"],
        ),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
            make()
        assert all(word in str(raised.value) for word in words), raised.value
    for make in (
        lambda: linen.FeedForward(D, 16, activation="gelu"),
        lambda: linen.TransformerLM(1, 2, D, 16, 5, activation="gelu"),
    ):
        with pytest.raises(TypeError, match="activation"):
            make()
    with pytest.raises(TypeError, match="mistake"):
        TransformerEncoderLayer(2, D, 16, mistake=1)


def test_wrong_inputs_are_told():
    layer = MultiHeadAttention(2, D)
    for inputs, words in (
        ((X[..., :7],), ["inputs_q", "8", "7"]),
        ((X, X[..., :3]), ["inputs_k", "8", "3"]),
        ((X, X, X[:, :3]), ["length", "6", "3"]),
        ((X[0, 0],), ["inputs_q", "[8]"]),
        ((X, X[:1]), ["batch"]),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
            jax.eval_shape(layer.init, jax.random.key(0), *inputs)
        assert all(word in str(raised.value) for word in words), raised.value
    with pytest.raises(TypeError, match="inputs_q"):
        layer.init(jax.random.key(0), X.astype(int))
