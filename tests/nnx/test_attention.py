"""MultiHeadAttention against the float64 reference, and their promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import MultiHeadAttention, additive, concat, general
from attention_jax.testing import reference_attention

T, S = 5, 7
LENGTHS = np.array([7, 3])

SCORES = {
    "dot": ("dot", lambda score: {}),
    "scaled_dot": ("scaled_dot", lambda score: {}),
    "general": ("general", lambda score: {"weight": score.weight}),
    "additive": ("additive", lambda s: {"w_query": s.w_query, "w_key": s.w_key, "v": s.v}),
    "concat": ("concat", lambda score: {"weight": score.weight, "v": score.v}),
}


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _square(layer, x):
    return jnp.sum(layer(x) ** 2)


def _keys_seen():
    return np.arange(S) < LENGTHS[:, None]


def _reference(layer, name, query, states, mask):
    """The layer in NumPy: projections, the reference, the output projection."""

    def project(linear, x, axes=1):
        kernel, bias = np.asarray(linear.kernel[...]), np.asarray(linear.bias[...])
        return np.tensordot(np.asarray(x, np.float64), kernel, axes) + bias

    arrays = (project(layer.query, query), project(layer.key, states), project(layer.value, states))
    if name == "cosine":
        raw = np.asarray(layer.score.raw_scale[...], np.float64)
        params = {"scale": np.log1p(np.exp(raw)) + 1e-4}
    else:
        params = {k: v[...] for k, v in SCORES[name][1](layer.score).items()}
    found = reference_attention(*arrays, score=name, params=params, mask=mask)
    return project(layer.out, found.out, 2), found


@nnx.jit
def _read(layer, query, states, mask=None):
    """Every way to read a layer: output, output with statistics, weights."""
    return (
        layer(query, states, mask=mask),
        layer.with_stats(query, states, mask=mask),
        layer.attention_weights(query, states, mask=mask),
    )


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "dense") for name in (*SCORES, "cosine")),
        # The engine's own tests have every score on every kernel.
        *((name, "blockwise") for name in ("general", "additive")),
    ],
)
def test_every_score_by_name_equals_the_reference(name, implementation):
    layer = MultiHeadAttention(
        4,
        12,
        num_kv_heads=2 if implementation == "dense" else 4,
        in_kv_features=9,
        score=name,
        bias_init=nnx.initializers.normal(1.0),
        implementation=implementation,
        block_size=None if implementation == "dense" else 3,
        rngs=nnx.Rngs(0),
    )
    query, states = _normal(2, T, 12), _normal(2, S, 9, seed=1)
    mask = np.broadcast_to(_keys_seen()[:, None, None, :], (2, 1, T, S))
    expected, found = _reference(layer, name, query, states, mask)

    out, (again, stats), weights = _read(layer, query, states, jnp.asarray(mask))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, out, atol=1e-6)
    np.testing.assert_allclose(stats.lse, found.lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weights, found.weights, rtol=1e-4, atol=1e-5)
    entropy = -np.sum(found.weights * np.log(np.where(found.weights > 0, found.weights, 1)), -1)
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*SCORES, "cosine"])
def test_every_parameter_of_a_score_trains(name):
    layer = MultiHeadAttention(2, 8, score=name, rngs=nnx.Rngs(0))
    gradient = nnx.jit(nnx.grad(_square))(layer, _normal(T, 8))
    parameters = nnx.to_pure_dict(gradient).get("score", {})
    expected = {"dot": 0, "scaled_dot": 0, "general": 1, "additive": 3, "concat": 2, "cosine": 1}
    assert len(parameters) == expected[name]
    for parameter in parameters.values():
        assert parameter.shape[0] == 2, "one for each head"
        assert np.all(np.any(np.asarray(parameter).reshape(2, -1) != 0, axis=-1))


def test_heads_have_parameters_of_their_own_unless_shared():
    own = MultiHeadAttention(2, 8, score=additive(5), rngs=nnx.Rngs(0))
    shared = MultiHeadAttention(2, 8, score=additive(5, shared=True), rngs=nnx.Rngs(0))
    assert own.score.w_query.shape == (2, 4, 5)
    assert shared.score.w_query.shape == (4, 5)
    assert not np.allclose(own.score.w_query[0], own.score.w_query[1])
    one = MultiHeadAttention(2, 8, score=general(shared=True), rngs=nnx.Rngs(0))
    assert one.score.weight.shape == (4, 4)


def test_an_activation_by_choice_reaches_the_score():
    x = _normal(T, 8)
    layers = [
        MultiHeadAttention(2, 8, score=factory(activation=f), rngs=nnx.Rngs(0))
        for factory in (additive, concat)
        for f in (jnp.tanh, jax.nn.leaky_relu)
    ]
    tanh_additive, leaky_additive, tanh_concat, leaky_concat = (layer(x) for layer in layers)
    assert not np.allclose(tanh_additive, leaky_additive)
    assert not np.allclose(tanh_concat, leaky_concat)


@pytest.mark.parametrize("as_factory", [False, True])
def test_a_score_object_becomes_parameters_and_stays_the_same_score(as_factory):
    tau, weight = jnp.full(2, 1.5), _normal(2, 4, 4)
    score = aj.scores.temperature(aj.scores.general(weight) + _normal(2, T, T), tau)
    given = (lambda heads, depth, rngs: score) if as_factory else score
    layer = MultiHeadAttention(2, 8, score=given, rngs=nnx.Rngs(0))
    assert layer.score() == score
    arrays = nnx.to_pure_dict(nnx.state(layer.score, nnx.Param))
    assert len(arrays) == 3
    x = _normal(T, 8)
    gradient = nnx.jit(nnx.grad(_square))(layer, x)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient["score"]))
    plain = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    query, key, value = plain.query(x), plain.key(x), plain.value(x)
    expected = plain.out(aj.attend(query, key, value, score=score))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_numbers_in_a_score_stay_as_they_are():
    layer = MultiHeadAttention(2, 8, score=aj.scores.scaled_dot(0.25), rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(layer.score))
    assert layer.score() == aj.scores.scaled_dot(0.25)


def test_a_score_with_whole_numbers_does_not_train_them():
    table, rows = _normal(3), jnp.array([0, 2, 1, 1, 0])
    looked_up = jax.tree_util.Partial(
        lambda table, rows, q, k, t, s: table[rows[s]][None] + jnp.zeros((t.shape[0], 1)),
        table,
        rows,
    )
    layer = MultiHeadAttention(1, 4, score=aj.scores.custom(looked_up), rngs=nnx.Rngs(0))
    assert len(jax.tree.leaves(nnx.state(layer.score, nnx.Param))) == 1
    weights = layer.attention_weights(_normal(2, 4), _normal(5, 4))
    np.testing.assert_allclose(
        weights[0], np.broadcast_to(jax.nn.softmax(table[rows]), (2, 5)), rtol=1e-5
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
def test_query_heads_use_their_group_s_value_head(heads):
    N, K = heads
    layer = MultiHeadAttention(N, 2 * N, N, N, K, use_bias=False, rngs=nnx.Rngs(0))
    layer.value.kernel[...] = jnp.zeros_like(layer.value.kernel[...])
    layer.value.kernel[...] += jnp.arange(K, dtype=jnp.float32).reshape(1, K, 1)
    layer.out.kernel[...] = jnp.eye(N).reshape(N, 1, N)
    x = jnp.ones((T, 2 * N)) / (2 * N)
    np.testing.assert_allclose(layer(x)[0], np.arange(N) // (N // K), atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_the_scale_is_that_of_the_head(heads):
    x = _normal(T, 16)
    layer = MultiHeadAttention(heads, 16, rngs=nnx.Rngs(0))
    query, key = np.asarray(layer.query(x)), np.asarray(layer.key(x))
    logits = np.einsum("tnh,snh->nts", query, key) / np.sqrt(16 / heads)
    np.testing.assert_allclose(
        layer.attention_weights(x), jax.nn.softmax(logits), rtol=1e-4, atol=1e-5
    )
    custom = MultiHeadAttention(heads, 16, score=aj.scores.scaled_dot(0.1), rngs=nnx.Rngs(0))
    expected = jax.nn.softmax(logits * np.sqrt(16 / heads) * 0.1)
    np.testing.assert_allclose(custom.attention_weights(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dropout_rate", "explicit", "batch"),
    [(0.0, False, (2,)), (0.3, False, (2, 2)), (0.0, True, (2, 2)), (0.3, True, (2,))],
    ids=str,
)
def test_causal_and_the_call_s_mask_hold_on_every_path(dropout_rate, explicit, batch):
    """Case A08: no option costs the causal mask, and both masks hold where both are given."""
    layer = MultiHeadAttention(
        2,
        8,
        mask=aj.masks.causal(),
        dropout_rate=dropout_rate,
        deterministic=False,
        rngs=nnx.Rngs(0),
    )
    # The call's mask hides key 0 from everybody but query 0, and only where it is given.
    mask = jnp.ones((6, 6), bool).at[1:, 0].set(False) if explicit else None
    x = _normal(*batch, 6, 8)

    @nnx.jit
    def run(layer, x, stream):
        flags = {"mask": mask, "rngs": stream}
        weights = layer.attention_weights(x, mask=mask)
        return layer(x, **flags), layer.with_stats(x, **flags)[0], jnp.moveaxis(weights, -2, 0)

    def rows(outputs, others):
        """For each output, which rows differ."""
        calls = [
            np.any(a != b, axis=(*range(len(batch)), -1))
            for a, b in zip(outputs[:2], others[:2], strict=True)
        ]
        weights = np.any(outputs[2] != others[2], axis=tuple(range(1, outputs[2].ndim)))
        return [*calls, weights]

    before = run(layer, x, nnx.Rngs(3))
    for key in range(6):
        after = run(layer, x.at[..., key, :].add(1.0), nnx.Rngs(3))
        seen = np.arange(6) >= key
        if explicit and key == 0:
            seen = np.arange(6) == 0
        for which, changed in zip(("call", "stats", "weights"), rows(before, after), strict=True):
            assert not np.any(changed & ~seen), (which, key)
            if dropout_rate == 0.0 or which == "weights":
                # Row 0 has one key alone, of weight 1 whatever its score.
                assert np.all(changed[seen][1:]), (which, key)


def test_a_mask_at_construction_holds_with_one_in_the_call():
    x = _normal(2, 6, 8)
    lengths = jnp.array([6, 4])
    plain = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    causal, padding = aj.masks.causal(), aj.masks.padding(lengths)
    run = nnx.jit(lambda layer, mask: layer(x, mask=mask))
    both = run(plain, causal & padding)
    arrays = {"causal": causal.to_array(6, 6), "padding": padding.to_array(6, 6)}
    for built, called in (
        (causal, padding),
        (arrays["causal"], padding),
        (np.asarray(arrays["padding"]), np.asarray(arrays["causal"])),
        (causal & padding, None),
    ):
        layer = MultiHeadAttention(2, 8, mask=built, rngs=nnx.Rngs(0))
        np.testing.assert_allclose(run(layer, called), both, rtol=1e-5, atol=1e-6)
    assert not np.allclose(run(plain, None), both)


def test_bias_in_the_call_is_added():
    x = _normal(2, T, 8)
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    bias = _normal(2, T, T, seed=3)
    logits = jnp.einsum("btnh,bsnh->bnts", layer.query(x), layer.key(x)) / 2.0
    expected = jax.nn.softmax(logits + bias[None])
    np.testing.assert_allclose(
        layer.attention_weights(x, bias=bias), expected, rtol=1e-5, atol=1e-6
    )
    out, _ = layer.with_stats(x, bias=bias)
    np.testing.assert_allclose(layer(x, bias=bias), out, rtol=1e-6, atol=1e-6)
    assert not np.allclose(layer(x), out)


@pytest.mark.parametrize(
    ("score", "implementation"), [("additive", "dense"), ("scaled_dot", "blockwise")]
)
def test_an_empty_row_is_the_output_s_bias_and_its_gradients_are_finite(score, implementation):
    layer = MultiHeadAttention(
        2,
        8,
        score=score,
        implementation=implementation,
        out_bias_init=nnx.initializers.ones_init(),
        rngs=nnx.Rngs(0),
    )
    x = _normal(2, T, 8)
    mask = jnp.ones((2, 1, T, T), bool).at[1].set(False).at[0, 0, 2].set(False)
    out, _, weights = _read(layer, x, x, mask)
    np.testing.assert_array_equal(out[1], jnp.ones((T, 8)))
    np.testing.assert_array_equal(out[0, 2], jnp.ones(8))
    np.testing.assert_allclose(
        weights.sum(-1), mask[..., 0].astype(jnp.float32) * jnp.ones((2, 2, T)), atol=1e-6
    )
    loss = nnx.grad(lambda layer, x: jnp.sum(layer(x, mask=mask) ** 2), argnums=(0, 1))
    gradients = nnx.jit(loss)(layer, x)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("score", "bad", "normalize_qk"),
    [
        ("scaled_dot", np.nan, True),
        ("additive", np.inf, False),
        ("general", np.nan, False),
        ("cosine", np.inf, True),
    ],
)
def test_what_is_masked_does_not_matter_to_outputs_and_parameters(score, bad, normalize_qk):
    """Cases A01 and A02: padding holds garbage, and neither loss nor gradients may know."""
    layer = MultiHeadAttention(2, 8, score=score, normalize_qk=normalize_qk, rngs=nnx.Rngs(0))
    query, states = _normal(2, T, 8), _normal(2, S, 8, seed=1)
    seen = jnp.asarray(_keys_seen())
    mask = aj.masks.padding(jnp.asarray(LENGTHS))

    def loss(layer, query, states):
        return jnp.sum(jnp.sin(layer(query, states, mask=mask)))

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1, 2)))
    value, gradients = run(layer, query, states)
    garbage = jnp.where(seen[..., None], states, bad)
    again, spoiled = run(layer, query, garbage)
    np.testing.assert_allclose(value, again, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(spoiled), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert not np.isfinite(layer(query, garbage)).all(), "what is seen stays loud"


def test_a_query_that_is_masked_away_does_not_matter_either():
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    query, states = _normal(2, T, 8), _normal(2, S, 8, seed=1)
    mask = aj.masks.padding(jnp.array([S, 3]), jnp.array([T, 2]))

    def loss(layer, query):
        return jnp.sum(layer(query, states, mask=mask) ** 2)

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    spoiled = run(layer, query.at[1, 2:].set(jnp.nan))
    for left, right in zip(
        jax.tree.leaves(run(layer, query)), jax.tree.leaves(spoiled), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)


def test_what_is_asked_of_the_engine_is_done_or_refused():
    with pytest.raises(NotImplementedError, match="block_size"):
        MultiHeadAttention(2, 8, implementation="dense", block_size=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="magic"):
        MultiHeadAttention(2, 8, implementation="magic", rngs=nnx.Rngs(0))


def test_padded_equals_unpadded():
    layer = MultiHeadAttention(2, 8, score="additive", rngs=nnx.Rngs(0))
    query, states = _normal(2, T, 8), _normal(2, S, 8, seed=1)

    def loss(layer, query, states, mask=None):
        return jnp.sum(layer(query, states, mask=mask) ** 2)

    gradient = nnx.jit(nnx.grad(loss, argnums=(0, 1, 2)))
    padded = gradient(layer, query[1:], states[1:], aj.masks.padding(jnp.array([3])))
    alone = gradient(layer, query[1:], states[1:, :3])
    for left, right in zip(jax.tree.leaves(padded[:2]), jax.tree.leaves(alone[:2]), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(padded[2][:, :3], alone[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(padded[2][:, 3:], 0)


@pytest.mark.parametrize("lengths", [(0, S), (T, 0), (1, 1)], ids=str)
def test_any_length_is_legal(lengths):
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    out = layer(jnp.ones((2, lengths[0], 8)), jnp.ones((2, lengths[1], 8)))
    assert out.shape == (2, lengths[0], 8)
    assert np.all(np.isfinite(out))


def test_numpy_arrays_are_welcome():
    layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, T, 8)).astype(np.float32)
    np.testing.assert_array_equal(layer(x), layer(jnp.asarray(x)))
