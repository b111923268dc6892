"""Multi-head attention in both flavours: against the float64 reference, masks, empty rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.nnx import additive, concat, general
from attention_jax.testing import reference_attention

T, S = 5, 7
LENGTHS = np.array([7, 3])
SCORES = {
    "dot": (),
    "scaled_dot": (),
    "general": ("weight",),
    "additive": ("w_query", "w_key", "v"),
    "concat": ("weight", "v"),
    "cosine": ("raw_scale",),
}


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _attention(flavour, *sizes, inputs=None, **options):
    inputs = (jnp.zeros((T, sizes[1])),) if inputs is None else inputs
    return flavour.layer("MultiHeadAttention", *sizes, inputs=inputs, **options)


def _keys_seen():
    return np.arange(S) < LENGTHS[:, None]


def _project(part, x, axes=1):
    """A projection in NumPy."""
    kernel = np.asarray(part["kernel"], np.float64)
    return np.tensordot(np.asarray(x, np.float64), kernel, axes) + np.asarray(part.get("bias", 0))


def _equal(trees, rtol=1e-5, atol=1e-5):
    for left, right in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


def _gradients(layer, *inputs, **options):
    """Of a loss, by the parameters and every input, compiled; and the loss."""

    def loss(params, *inputs):
        return jnp.sum(jnp.sin(layer.replace(params)(*inputs, **options)))

    run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(1 + len(inputs)))))
    return run(layer.params, *inputs)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "dense") for name in SCORES),
        # The engine's own tests have every score on every kernel.
        *((name, "blockwise") for name in ("general", "additive")),
    ],
)
def test_every_score_by_name_equals_the_reference(flavour, name, implementation):
    query, states = _normal(2, T, 12), _normal(2, S, 9, seed=1)
    layer = _attention(
        flavour,
        4,
        12,
        num_kv_heads=2 if implementation == "dense" else 4,
        in_kv_features=9,
        score=name,
        bias_init=jax.nn.initializers.normal(1.0),
        implementation=implementation,
        block_size=None if implementation == "dense" else 3,
        inputs=(query, states),
    )
    mask = np.broadcast_to(_keys_seen()[:, None, None, :], (2, 1, T, S))
    made = [_project(layer.params[part], x) for part, x in (("query", query), ("key", states))]
    made.append(_project(layer.params["value"], states))
    params = dict(layer.params.get("score", {}))
    if name == "cosine":
        raw = np.asarray(params["raw_scale"], np.float64)
        params = {"scale": np.log1p(np.exp(raw)) + 1e-4}
    found = reference_attention(*made, score=name, params=params, mask=mask)
    expected = _project(layer.params["out"], found.out, 2)

    out = layer(query, states, mask=mask)
    again, stats = layer(query, states, mask=mask, method="with_stats")
    weights = layer(query, states, mask=mask, method="attention_weights")
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(again, out, atol=1e-6)
    np.testing.assert_allclose(stats.lse, found.lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weights, found.weights, rtol=1e-4, atol=1e-5)
    entropy = -np.sum(found.weights * np.log(np.where(found.weights > 0, found.weights, 1)), -1)
    np.testing.assert_allclose(stats.entropy, entropy, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SCORES)
def test_every_parameter_of_a_score_trains(flavour, name):
    layer = _attention(flavour, 2, 8, score=name)
    _, (gradient, _) = _gradients(layer, _normal(T, 8))
    parameters = gradient.get("score", {})
    assert set(parameters) == set(SCORES[name])
    for parameter in parameters.values():
        assert parameter.shape[0] == 2, "one for each head"
        assert np.all(np.any(np.asarray(parameter).reshape(2, -1) != 0, axis=-1))


def test_heads_have_parameters_of_their_own_unless_shared(flavour):
    own = _attention(flavour, 2, 8, score=additive(5)).params["score"]["w_query"]
    shared = _attention(flavour, 2, 8, score=additive(5, shared=True)).params["score"]["w_query"]
    assert own.shape == (2, 4, 5)
    assert shared.shape == (4, 5)
    assert not np.allclose(own[0], own[1])
    one = _attention(flavour, 2, 8, score=general(shared=True))
    assert one.params["score"]["weight"].shape == (4, 4)


def test_an_activation_by_choice_reaches_the_score(flavour):
    x = _normal(T, 8)
    for factory in (additive, concat):
        tanh, leaky = (
            _attention(flavour, 2, 8, score=factory(activation=f))(x)
            for f in (jnp.tanh, jax.nn.leaky_relu)
        )
        assert not np.allclose(tanh, leaky)


@pytest.mark.parametrize("as_factory", [False, True])
def test_a_score_object_becomes_parameters_and_stays_the_same_score(flavour, as_factory):
    tau, weight = jnp.full(2, 1.5), _normal(2, 4, 4)
    score = aj.scores.temperature(aj.scores.general(weight) + _normal(2, T, T), tau)
    given = (lambda heads, depth, source: score) if as_factory else score
    x = _normal(T, 8)
    layer = _attention(flavour, 2, 8, score=given, inputs=(x,))
    arrays = jax.tree.leaves(layer.params["score"])
    assert len(arrays) == 3
    if flavour == "nnx":
        assert layer.module.score() == score
    _, (gradient, _) = _gradients(layer, x)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient["score"]))
    parts = [_project(layer.params[part], x) for part in ("query", "key", "value")]
    query, key, value = (jnp.asarray(part, jnp.float32) for part in parts)
    attended = aj.attend(query, key, value, score=score)
    expected = _project(layer.params["out"], attended, 2)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_numbers_in_a_score_stay_as_they_are(flavour):
    layer = _attention(flavour, 2, 8, score=aj.scores.scaled_dot(0.25))
    assert not layer.params.get("score", {})
    if flavour == "nnx":
        assert layer.module.score() == aj.scores.scaled_dot(0.25)


def test_a_score_with_whole_numbers_does_not_train_them(flavour):
    table, rows = _normal(3), jnp.array([0, 2, 1, 1, 0])
    looked_up = jax.tree_util.Partial(
        lambda table, rows, q, k, t, s: table[rows[s]][None] + jnp.zeros((t.shape[0], 1)),
        table,
        rows,
    )
    query, states = _normal(2, 4), _normal(5, 4)
    score = aj.scores.custom(looked_up)
    layer = _attention(flavour, 1, 4, score=score, inputs=(query, states))
    assert len(jax.tree.leaves(layer.params["score"])) == 1
    weights = layer(query, states, method="attention_weights")
    np.testing.assert_allclose(
        weights[0], np.broadcast_to(jax.nn.softmax(table[rows]), (2, 5)), rtol=1e-5
    )


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
def test_query_heads_use_their_group_s_value_head(flavour, heads):
    N, K = heads
    layer = _attention(flavour, N, 2 * N, N, N, K, use_bias=False)
    value = jnp.zeros((2 * N, K, 1)) + jnp.arange(K, dtype=jnp.float32).reshape(1, K, 1)
    kernels = {"value": value, "out": jnp.eye(N).reshape(N, 1, N)}
    params = {**layer.params, **{name: {"kernel": kernel} for name, kernel in kernels.items()}}
    x = jnp.ones((T, 2 * N)) / (2 * N)
    out = layer.replace(params)(x)
    np.testing.assert_allclose(out[0], np.arange(N) // (N // K), atol=1e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_the_scale_is_that_of_the_head(flavour, heads):
    x = _normal(T, 16)
    layer = _attention(flavour, heads, 16)
    query, key = (_project(layer.params[part], x) for part in ("query", "key"))
    logits = np.einsum("tnh,snh->nts", query, key) / np.sqrt(16 / heads)
    weights = layer(x, method="attention_weights")
    np.testing.assert_allclose(weights, jax.nn.softmax(logits), rtol=1e-4, atol=1e-5)
    custom = _attention(flavour, heads, 16, score=aj.scores.scaled_dot(0.1))
    weights = custom.replace(layer.params)(x, method="attention_weights")
    expected = jax.nn.softmax(logits * np.sqrt(16 / heads) * 0.1)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dropout_rate", "explicit", "batch"),
    [(0.0, False, (2,)), (0.3, False, (2, 2)), (0.0, True, (2, 2)), (0.3, True, (2,))],
    ids=str,
)
def test_causal_and_the_call_s_mask_hold_on_every_path(flavour, dropout_rate, explicit, batch):
    """Case A08: no option costs the causal mask, and both masks hold where both are given."""
    x = _normal(*batch, 6, 8)
    layer = _attention(
        flavour, 2, 8, mask=aj.masks.causal(), dropout_rate=dropout_rate, deterministic=False,
        inputs=(x,),
    )  # fmt: skip
    # The call's mask hides key 0 from all queries but query 0, and only where it is given.
    mask = jnp.ones((6, 6), bool).at[1:, 0].set(False) if explicit else None

    @jax.jit
    def run(x):
        key = jax.random.key(3)
        weights = layer.apply(layer.variables, x, mask=mask, method="attention_weights")
        out = layer.apply(layer.variables, x, mask=mask, key=key)
        again, _ = layer.apply(layer.variables, x, mask=mask, key=key, method="with_stats")
        return out, again, jnp.moveaxis(weights, -2, 0)

    def rows(outputs, others):
        """For each output, which rows differ."""
        calls = [
            np.any(a != b, axis=(*range(len(batch)), -1))
            for a, b in zip(outputs[:2], others[:2], strict=True)
        ]
        weights = np.any(outputs[2] != others[2], axis=tuple(range(1, outputs[2].ndim)))
        return [*calls, weights]

    before = run(x)
    for key in range(6):
        after = run(x.at[..., key, :].add(1.0))
        seen = np.arange(6) >= key
        if explicit and key == 0:
            seen = np.arange(6) == 0
        for which, changed in zip(("call", "stats", "weights"), rows(before, after), strict=True):
            assert not np.any(changed & ~seen), (which, key)
            if dropout_rate == 0.0 or which == "weights":
                # Row 0 has one key alone, of weight 1 whatever its score.
                assert np.all(changed[seen][1:]), (which, key)


def test_a_mask_at_construction_holds_with_one_in_the_call(flavour):
    x = _normal(2, 6, 8)
    plain = _attention(flavour, 2, 8, inputs=(x,))
    causal, padding = aj.masks.causal(), aj.masks.padding(jnp.array([6, 4]))
    both = plain(x, mask=causal & padding)
    arrays = {"causal": causal.to_array(6, 6), "padding": padding.to_array(6, 6)}
    for built, called in (
        (causal, padding),
        (arrays["causal"], padding),
        (np.asarray(arrays["padding"]), np.asarray(arrays["causal"])),
        (causal & padding, None),
    ):
        layer = _attention(flavour, 2, 8, mask=built, inputs=(x,)).replace(plain.params)
        np.testing.assert_allclose(layer(x, mask=called), both, rtol=1e-5, atol=1e-6)
    assert not np.allclose(plain(x), both)


def test_bias_in_the_call_is_added(flavour):
    x = _normal(2, T, 8)
    layer = _attention(flavour, 2, 8, inputs=(x,))
    bias = _normal(2, T, T, seed=3)
    query, key = (_project(layer.params[part], x) for part in ("query", "key"))
    expected = jax.nn.softmax(np.einsum("btnh,bsnh->bnts", query, key) / 2.0 + bias[None])
    weights = layer(x, bias=bias, method="attention_weights")
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    out, _ = layer(x, bias=bias, method="with_stats")
    np.testing.assert_allclose(layer(x, bias=bias), out, rtol=1e-6, atol=1e-6)
    assert not np.allclose(layer(x), out)
    # A bias of -inf masks a pair.
    mask = jnp.tril(jnp.ones((T, T), bool))
    hidden = layer(x, bias=jnp.where(mask, 0.0, -jnp.inf))
    np.testing.assert_allclose(layer(x, mask=mask), hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("score", "implementation"), [("additive", "dense"), ("scaled_dot", "blockwise")]
)
def test_an_empty_row_is_the_output_s_bias_and_its_gradients_are_finite(
    flavour, score, implementation
):
    x = _normal(2, T, 8)
    layer = _attention(
        flavour, 2, 8, score=score, implementation=implementation,
        out_bias_init=jax.nn.initializers.ones, inputs=(x,),
    )  # fmt: skip
    mask = jnp.ones((2, 1, T, T), bool).at[1].set(False).at[0, 0, 2].set(False)
    out, weights = layer(x, mask=mask), layer(x, mask=mask, method="attention_weights")
    np.testing.assert_array_equal(out[1], jnp.ones((T, 8)))
    np.testing.assert_array_equal(out[0, 2], jnp.ones(8))
    np.testing.assert_allclose(
        weights.sum(-1), mask[..., 0].astype(jnp.float32) * jnp.ones((2, 2, T)), atol=1e-6
    )
    _, gradients = _gradients(layer, x, mask=mask)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    garbage = x.at[1].set(jnp.nan)
    np.testing.assert_array_equal(layer(garbage, mask=mask), out)
    _equal((_gradients(layer, garbage, mask=mask)[1][0], gradients[0]))


@pytest.mark.parametrize(
    ("score", "bad", "normalize_qk"),
    [
        ("scaled_dot", np.nan, True),
        ("additive", np.inf, False),
        ("additive", np.nan, True),
        ("general", np.nan, False),
        ("cosine", np.inf, True),
    ],
)
def test_what_is_masked_does_not_matter_to_outputs_and_parameters(
    flavour, score, bad, normalize_qk
):
    """Cases A01 and A02: garbage in padding changes neither the loss nor a gradient."""
    query, states = _normal(2, T, 8), _normal(2, S, 8, seed=1)
    layer = _attention(
        flavour, 2, 8, score=score, normalize_qk=normalize_qk, inputs=(query, states)
    )
    mask = aj.masks.padding(jnp.asarray(LENGTHS))
    garbage = jnp.where(jnp.asarray(_keys_seen())[..., None], states, bad)
    found, expected = (_gradients(layer, query, x, mask=mask) for x in (garbage, states))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    _equal((found[1], expected[1]))
    assert not np.isfinite(layer(query, garbage)).all(), "what is visible propagates"


def test_a_query_that_is_masked_away_does_not_matter_either(flavour):
    query, states = _normal(2, T, 8), _normal(2, S, 8, seed=1)
    layer = _attention(flavour, 2, 8, inputs=(query, states))
    mask = aj.masks.padding(jnp.array([S, 3]), jnp.array([T, 2]))
    garbage = query.at[1, 2:].set(jnp.nan)
    _equal([_gradients(layer, x, states, mask=mask) for x in (garbage, query)])


def test_a_block_size_needs_a_kernel_with_blocks(flavour):
    with pytest.raises(NotImplementedError, match="block_size"):
        flavour.module("MultiHeadAttention", 2, 8, implementation="dense", block_size=4)


def test_padded_equals_unpadded(flavour):
    query, states = _normal(1, T, 8), _normal(1, S, 8, seed=1)
    layer = _attention(flavour, 2, 8, score="additive", inputs=(query, states))
    mask = aj.masks.padding(jnp.array([3]))
    _, padded = _gradients(layer, query, states, mask=mask)
    _, alone = _gradients(layer, query, states[:, :3])
    _equal((padded[:2], alone[:2]), rtol=1e-4)
    np.testing.assert_allclose(padded[2][:, :3], alone[2], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(padded[2][:, 3:], 0)


@pytest.mark.parametrize("lengths", [(0, S), (T, 0), (1, 1)], ids=str)
def test_any_length_is_legal(flavour, lengths):
    layer = _attention(flavour, 2, 8)
    out = layer(jnp.ones((2, lengths[0], 8)), jnp.ones((2, lengths[1], 8)))
    assert out.shape == (2, lengths[0], 8)
    assert np.all(np.isfinite(out))


def test_numpy_arrays_are_welcome(flavour):
    x = np.random.default_rng(0).normal(size=(2, T, 8)).astype(np.float32)
    layer = _attention(flavour, 2, 8, inputs=(x,))
    np.testing.assert_array_equal(
        layer.apply(layer.variables, x), layer.apply(layer.variables, jnp.asarray(x))
    )


def test_projections_start_with_the_fan_of_a_matrix(flavour):
    """Case A27."""
    layer = _attention(flavour, 8, 512, inputs=(jnp.ones((1, 512)),))
    for name in ("query", "key", "value", "out"):
        kernel = np.asarray(layer.params[name]["kernel"])
        assert kernel.shape == ((8, 64, 512) if name == "out" else (512, 8, 64))
        assert abs(kernel.std() * np.sqrt(512) - 1) < 0.03


def test_the_receptive_field_of_a_causal_layer(flavour):
    length, x = 6, _normal(1, 6, 2)
    options = {"mask": aj.masks.causal(), "kernel_init": jax.nn.initializers.ones}
    layer = _attention(flavour, 1, 2, inputs=(x,), **options)
    jacobian = jax.jit(jax.jacobian(lambda x: layer(x).sum(-1)[0]))(x)
    reached = np.any(np.abs(jacobian[:, 0]) > 1e-5, axis=-1)
    np.testing.assert_array_equal(reached, np.tril(np.ones((length, length), bool)))
