"""The front door: mistakes are named, empty axes are legal, the plan is what runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj

RNG = np.random.default_rng(0)
BLOCKWISE_THOROUGH = ["dense", pytest.param("blockwise", marks=pytest.mark.thorough), "flash"]


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


QUERY, KEY, VALUE = normal(2, 5, 4, 8), normal(2, 7, 2, 8), normal(2, 7, 2, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": KEY[..., :6]}, ValueError, r"query depth 8 and key depth 6 must match \(H\)"),
        ({"value": VALUE[:, :6]}, ValueError, r"key length 7 and value length 6 must match \(S\)"),
        ({"value": VALUE[:, :, :1]}, ValueError, r"key heads 2 and value heads 1 must match"),
        ({"key": KEY[:1]}, ValueError, r"query and key must have the same batch axes"),
        ({"query": QUERY[:, :, :3]}, ValueError, r"N = 3.*multiple.*K = 2"),
        ({"query": QUERY[0, 0]}, ValueError, r"query must be \[\*B, T, N, H\], got \[4, 8\]"),
        ({"query": QUERY.astype(int)}, TypeError, "query must be floating"),
        ({"key": [1.0]}, TypeError, "key must be an array, got list"),
        ({"mask": np.ones((5, 7), np.float32)}, TypeError, "bias"),
        ({"mask": np.ones((5, 6), bool)}, ValueError, r"mask has shape \[5, 6\].*\[..., 5, 7\]"),
        ({"bias": np.ones((5, 7), bool)}, TypeError, "mask"),
        ({"bias": np.ones((3, 5, 7), np.float32)}, ValueError, r"bias has shape \[3, 5, 7\]"),
        ({"query_positions": np.arange(4)}, ValueError, r"query_positions has shape \[4\]"),
        ({"key_positions": np.ones(7)}, TypeError, "key_positions must be integers"),
        ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must lie in \[0, 1\), got 1.0"),
        ({"dropout_rate": 0.1}, ValueError, "needs a dropout_key"),
        ({"implementation": "fast"}, ValueError, "implementation must be one of 'dense'"),
        ({"implementation": ()}, ValueError, "empty sequence"),
        ({"dropout_rate": 0.1, "dropout_key": 5}, TypeError, "dropout_key must be one PRNG key"),
        ({"precision": "hihg"}, ValueError, "precision must be None.*got 'hihg'"),
        ({"block_size": 0, "implementation": "flash"}, ValueError, "block_size must be at least 1"),
        ({"block_size": 8, "implementation": "dense"}, NotImplementedError, "no block_size"),
        ({"score": "dot"}, TypeError, "score"),
    ],
)
def test_mistakes(change, error, message):
    arguments = {"query": QUERY, "key": KEY, "value": VALUE, **change}
    with pytest.raises(error, match=message):
        aj.attend(**arguments)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
@pytest.mark.parametrize(("T", "S", "B"), [(0, 7, 2), (5, 0, 2), (0, 0, 2), (5, 7, 0)])
def test_empty_axes(implementation, T, S, B):
    query, key, value = QUERY[:B, :T], KEY[:B, :S], VALUE[:B, :S]
    out, stats = aj.attend_with_stats(query, key, value, implementation=implementation)
    assert out.shape == (B, T, 4, 3)
    assert not np.any(out)
    assert stats.lse.shape == (B, 4, T)
    assert np.all(stats.lse == -np.inf)
    assert not np.any(stats.entropy)
    assert aj.attention_weights(query, key).shape == (B, 4, T, S)


def test_statistics_are_those_of_the_weights():
    out, stats = aj.attend_with_stats(QUERY, KEY, VALUE, implementation="flash", block_size=3)
    logits = np.asarray(aj.scores.scaled_dot_score(QUERY, KEY), np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    p = np.exp(logits - lse[..., None])
    np.testing.assert_allclose(stats.lse, lse, rtol=1e-5)
    np.testing.assert_allclose(stats.entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(stats.max_logit, logits.max(-1), rtol=1e-5)
    np.testing.assert_allclose(aj.attention_weights(QUERY, KEY), p, rtol=1e-5, atol=1e-7)
    assert out.shape == (2, 5, 4, 3)


def test_a_sequence_is_tried_in_order():
    plan = aj.explain(QUERY, KEY, VALUE, implementation=("dense", "flash"), block_size=4)
    assert plan.implementation == "flash"
    assert "block_size" in plan.reasons["dense"]


def test_the_plan_counts_blocks():
    shape = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    plan = aj.explain(
        shape, shape, shape, mask=aj.masks.causal(), implementation="flash", block_size=16
    )
    assert (plan.visited, plan.partial, plan.skipped) == (10, 4, 6)
    assert plan.block_size == (16, 16)
    text = str(plan)
    assert ": 10 visited (4 partial), 6 skipped" in text
    padded = aj.explain(
        QUERY, KEY, VALUE, mask=aj.masks.padding(np.array([3, 7])), implementation="blockwise",
        block_size=4,
    )  # fmt: skip
    assert padded.visited + padded.skipped == 2 * 2 * 2
    assert padded.skipped == 2
    assert (padded.planes, plan.planes) == (2, 1)
    unknown = aj.explain(
        shape, shape, shape, mask=jax.ShapeDtypeStruct((64, 64), np.bool_),
        bias=jax.ShapeDtypeStruct((2, 64, 64), np.float32),
        score=aj.scores.general(jax.ShapeDtypeStruct((8, 8), np.float32)),
    )  # fmt: skip
    assert unknown.visited is None
    assert "counted when the mask is known" in str(unknown)
    assert "in all 2 planes of the mask" in str(padded)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_precision_reaches_the_products(implementation):
    def precise(precision, around):
        def loss(query, key):
            with jax.default_matmul_precision(around):
                out = aj.attend(
                    query, key, VALUE, precision=precision, implementation=implementation
                )
            return out.sum()

        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(QUERY, KEY))
        return text.count("(Precision.HIGHEST, Precision.HIGHEST)"), text.count("dot_general[")

    assert precise(None, None)[0] == 0
    for given in ("highest", None), (jax.lax.Precision.HIGHEST, None), (None, "highest"):
        some, every = precise(*given)
        assert some == every > 4


def test_eager_calls_trace_a_custom_function_once_each():
    calls = []

    def score(q, k, t, s):
        calls.append(1)
        return q @ k.T

    custom = aj.scores.custom(score)
    for _ in range(3):
        aj.attend(QUERY, KEY, VALUE, score=custom, implementation="flash")
    assert len(calls) == 3


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int16])
def test_integers_of_any_width(implementation, kind):
    lengths = np.array([3, 7], kind)
    ids, key_ids = np.array([1, 1, 2, 2, 2], kind), np.array([1, 1, 2, 2, 2, 1, 2], np.int32)
    mask = aj.masks.padding(lengths) & aj.masks.segments(ids, key_ids) & aj.masks.causal()
    positions = np.arange(5).astype(kind)
    with jax.enable_x64(True):
        got = aj.attend(
            QUERY, KEY, VALUE, mask=mask, query_positions=positions, implementation=implementation
        )
    want = aj.attend(QUERY, KEY, VALUE, mask=mask.to_array(5, 7), implementation="dense")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_positions_beyond_32_bits_are_loud():
    far = np.array([0, 1, 2, 3, 2**32])
    with pytest.raises(ValueError, match="query_positions must fit in 32 bits"):
        aj.attend(QUERY, KEY, VALUE, query_positions=far)
    with jax.enable_x64(True):  # where they are traced their rows are NaN
        out = jax.jit(lambda p: aj.attend(QUERY, KEY, VALUE, query_positions=p))(far)
    np.testing.assert_array_equal(np.isnan(out).all((0, 2, 3)), far > 3)
    assert not np.isnan(out[:, :4]).any()


@pytest.mark.parametrize("implementation", BLOCKWISE_THOROUGH)
def test_what_a_function_closes_over_has_its_gradient(implementation):
    options = {} if implementation == "dense" else {"block_size": 4}

    def loss(w):
        score = aj.scores.custom(lambda q, k, t, s: w * (q @ k.T))
        mask = aj.masks.custom(lambda t, s: s.astype(w.dtype) < w * 7)
        out = aj.attend(
            QUERY, KEY, VALUE, score=score, mask=mask, implementation=implementation, **options
        )
        return jnp.sum(jnp.sin(out))

    w, small = jnp.float32(0.5), 1e-2
    slope = (loss(w + small) - loss(w - small)) / (2 * small)
    np.testing.assert_allclose(jax.grad(loss)(w), slope, rtol=2e-2)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), jax.grad(loss)(w), rtol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_a_huge_number_behind_a_mask_has_no_gradient(implementation):
    value = VALUE.copy()
    value[:, 2] = np.finfo(np.float32).max
    visible = np.arange(KEY.shape[1]) != 2

    def gradients(value):
        return jax.grad(
            lambda *x: aj.attend(*x, mask=visible, implementation=implementation).sum(), (0, 1, 2)
        )(QUERY, KEY, value)

    for got, expected in zip(gradients(value), gradients(VALUE), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", BLOCKWISE_THOROUGH)
def test_a_huge_finite_key_that_is_hidden_changes_no_bit_whatever_the_score(implementation):
    options = {} if implementation == "dense" else {"block_size": (3, 4)}
    visible = np.arange(KEY.shape[1]) != 2
    bias = np.where(np.arange(KEY.shape[1]) == 4, -np.inf, 0).astype(np.float32)
    huge = KEY.copy()
    huge[:, [2, 4]] = np.finfo(np.float32).max
    huge[:, 2, :, ::2] *= -1  # a projection of it is inf - inf
    w_query, w_key, v = normal(8, 3), normal(4, 8, 3), normal(3)
    score = (
        aj.scores.additive(w_query, w_key, v)
        + aj.scores.custom(lambda q, k, t, s: (q * q) @ (k * k).T)
        + aj.scores.soft_cap(aj.scores.dot(), 5.0)
    )

    @jax.jit
    @jax.value_and_grad
    def run(inputs):
        query, key, value, score = inputs
        return aj.attend(
            query, key, value, score=score, mask=visible, bias=bias,
            implementation=implementation, **options,
        ).sum()  # fmt: skip

    got, expected = (run((QUERY, key, VALUE, score)) for key in (huge, KEY))
    for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_statistics_have_one_dtype_whatever_computes_them():
    kinds = (np.float32, np.float64)
    with jax.enable_x64(True):
        for which in range(3):
            for queries in (1, 5):
                inputs = [QUERY[:, :queries], KEY, VALUE]
                inputs[which] = inputs[which].astype(np.float64)
                for implementation in ("dense", "blockwise", "flash"):
                    out, stats = jax.eval_shape(
                        lambda *x, name=implementation: aj.attend_with_stats(
                            *x, implementation=name
                        ),
                        *inputs,
                    )
                    assert {x.dtype for x in stats} == {np.dtype(np.float64)}
                    assert out.dtype == kinds[which == 0]
        assert aj.attend_with_stats(QUERY, KEY[:, :0], VALUE[:, :0].astype(float))[1].lse.dtype == (
            np.float64
        )
    # NumPy's float64 is float32 where 64 bits are off, also where there is nothing to compute.
    inputs = [x.astype(float) for x in (QUERY, KEY[:, :0], VALUE[:, :0])]
    out, stats = aj.attend_with_stats(*inputs)
    assert out.dtype == stats.lse.dtype == aj.attention_weights(*inputs[:2]).dtype == np.float32


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_entropy_does_not_depend_on_how_low_a_row_is(implementation):
    options = {} if implementation == "dense" else {"block_size": 3}

    def entropy(query, low):
        bias = jnp.full((1, KEY.shape[1]), low, jnp.float32)
        stats = aj.attend_with_stats(
            query, KEY, VALUE, bias=bias, implementation=implementation, **options
        )[1]
        return stats.entropy

    both = jax.vmap(entropy, (None, 0))(QUERY, jnp.array([-1e9, jnp.finfo(jnp.float32).min]))
    np.testing.assert_allclose(both, np.log(KEY.shape[1]), rtol=1e-6)
    slope = jax.grad(lambda q, low: entropy(q, low).sum())
    np.testing.assert_allclose(slope(QUERY, -1e3), slope(QUERY, 0.0), atol=1e-3)


def test_what_a_score_hides_stays_hidden_in_scores_made_of_it():
    hide = np.where(np.arange(KEY.shape[1]) == 1, -np.inf, 0).astype(np.float32)[None]
    mask = np.isfinite(hide)
    for make in (
        lambda score, x: aj.scores.temperature(score, x),
        lambda score, x: aj.scores.log_length(score, x),
        lambda score, x: aj.scores.soft_cap(score, 2.0),
        lambda score, x: aj.scores.clip(score, -1.0, 1.0),
    ):

        def loss(x, hidden, make=make):
            score, given = aj.scores.scaled_dot(), {"mask": mask}
            if hidden:
                score, given = score + hide, {}
            return aj.attend(QUERY, KEY, VALUE, score=make(score, x), **given).sum()

        got, expected = (jax.value_and_grad(loss)(2.0, hidden) for hidden in (True, False))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", BLOCKWISE_THOROUGH)
def test_planes_on_which_the_additive_score_is_rational(implementation):
    options = {} if implementation == "dense" else {"block_size": (64, 66)}
    query, key, value = normal(2, 65, 2, 4), normal(2, 67, 1, 5), normal(2, 67, 1, 3)
    params = {"w_query": normal(4, 3), "w_key": normal(5, 3), "v": normal(3)}
    mask = RNG.random((2, 1, 65, 67)) > 0.4
    mask[0, :, 3] = False

    def run(query, key, value, params):
        score = aj.scores.additive(**params)
        return aj.attend(
            query, key, value, score=score, mask=mask, implementation=implementation, **options
        )

    given = query, key, value, params
    out, pull = jax.vjp(jax.jit(run), *given)
    d_out = normal(*out.shape)
    how = {"mask": mask, "score": "additive", "params": params}
    np.testing.assert_allclose(
        out, aj.testing.reference_attention(query, key, value, **how).out, rtol=1e-5, atol=1e-5
    )
    wanted = aj.testing.reference_gradients(query, key, value, d_out, **how)
    for got, expected in zip(
        jax.tree.leaves(pull(d_out)),
        jax.tree.leaves((wanted.query, wanted.key, wanted.value, wanted.params)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
