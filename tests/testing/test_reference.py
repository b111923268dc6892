"""The reference: derivatives against finite differences, and known values."""

import itertools
from typing import Any

import numpy as np
import pytest

from attention_jax.testing import reference_attention, reference_gradients, reference_scores

B, T, S, N, K, H, HK, V, A = (2,), 4, 5, 4, 2, 3, 3, 2, 3

SHARED = {
    "dot": {},
    "scaled_dot": {"scale": ()},
    "general": {"weight": (H, HK)},
    "additive": {"w_query": (H, A), "w_key": (HK, A), "v": (A,)},
    "concat": {"weight": (H + HK, A), "v": (A,)},
    "cosine": {"scale": ()},
}


def entropy(weights):
    logs = np.log(np.where(weights > 0, weights, 1.0))
    return -(weights * logs).sum(axis=-1)


def setup(rng, batch=B) -> Any:
    arrays = {
        "query": rng.normal(size=(*batch, T, N, H)),
        "key": rng.normal(size=(*batch, S, K, HK)),
        "value": rng.normal(size=(*batch, S, K, V)),
    }
    mask = rng.random((*batch, N, T, S)) < 0.7
    mask[..., 1, :] = False
    keep = rng.random((*batch, N, T, S)) < 0.6
    d_out = rng.normal(size=(*batch, T, N, V))
    d_lse, d_entropy = rng.normal(size=(2, *batch, N, T))
    return arrays, mask, keep, d_out, d_lse, d_entropy


def check(loss, point, gradient, eps=1e-5):
    """Central differences along three random directions of every array."""
    rng = np.random.default_rng(9)
    for name, x in point.items():
        assert gradient[name].shape == x.shape
        for _ in range(3):
            direction = np.asarray(rng.normal(size=x.shape))
            ends = [loss({**point, name: np.asarray(x + s * eps * direction)}) for s in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * eps)
            np.testing.assert_allclose(
                (gradient[name] * direction).sum(), slope, rtol=1e-6, atol=1e-8
            )


@pytest.mark.parametrize(("score", "per_head"), [*itertools.product(SHARED, (False, True))])
def test_gradients_match_finite_differences(score, per_head):
    rng = np.random.default_rng(0)
    arrays, mask, keep, d_out, d_lse, d_entropy = setup(rng)
    lead = (N,) if per_head else ()
    params = {name: rng.normal(size=lead + shape) for name, shape in SHARED[score].items()}
    point = {**arrays, "bias": rng.normal(size=(N, 1, S)), **params}

    def call(function, point, *extra, **named):
        theta = {name: point[name] for name in params}
        return function(
            point["query"], point["key"], point["value"], *extra, score=score, params=theta,
            bias=point["bias"], mask=mask, dropout_rate=0.4, dropout_mask=keep, **named,
        )  # fmt: skip

    def loss(point):
        out, weights, lse = call(reference_attention, point)
        finite = np.where(np.isfinite(lse), lse, 0.0)
        return (d_out * out).sum() + (d_lse * finite).sum() + (d_entropy * entropy(weights)).sum()

    g = call(reference_gradients, point, d_out, d_lse=d_lse, d_entropy=d_entropy)
    gradient = {"query": g.query, "key": g.key, "value": g.value, "bias": g.bias, **g.params}
    check(loss, point, gradient)


@pytest.mark.parametrize("activation", [*reference_scores.ACTIVATIONS])
def test_gradients_of_activations_and_modifiers_match_finite_differences(activation):
    rng = np.random.default_rng(1)
    cap = reference_scores.Activation(
        lambda e: 2 * np.tanh(e / 2), lambda e: 1 - np.tanh(e / 2) ** 2
    )
    inner = reference_scores.elementwise(reference_scores.additive(activation), cap)
    score = reference_scores.temperature(inner)
    params = {name: rng.normal(size=shape) for name, shape in SHARED["additive"].items()}
    point = {"query": rng.normal(size=(2, 1, H)), "key": rng.normal(size=(3, 1, HK))}
    point |= {**params, "tau": np.array(0.7)}
    value, d_out = rng.normal(size=(3, 1, V)), rng.normal(size=(2, 1, V))

    def named(p):
        return {name: p[name] for name in (*params, "tau")}

    def loss(p):
        ref = reference_attention(p["query"], p["key"], value, score=score, params=named(p))
        return (d_out * ref.out).sum()

    g = reference_gradients(
        point["query"], point["key"], value, d_out, score=score, params=named(point)
    )
    check(loss, point, {"query": g.query, "key": g.key, **g.params})


def test_explicit_scores_replace_the_score():
    rng = np.random.default_rng(2)
    arrays, mask, _, d_out, _, _ = setup(rng, batch=())
    q, k, v = arrays.values()
    heads = np.repeat(k, N // K, axis=1)
    scores = np.einsum("tnh,snh->nts", q, heads) / np.sqrt(H)
    a, b = (
        reference_attention(q, k, v, mask=mask),
        reference_attention(q, k, v, scores=scores, mask=mask),
    )
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    g = reference_gradients(q, k, v, d_out, scores=scores, mask=mask)
    exact = reference_gradients(q, k, v, d_out, mask=mask)
    assert g.scores is not None
    d_query = np.einsum("nts,snh->tnh", g.scores, heads) / np.sqrt(H)
    np.testing.assert_allclose(d_query, exact.query, rtol=1e-12)
    check(
        lambda p: (d_out * reference_attention(q, k, v, scores=p["s"], mask=mask).out).sum(),
        {"s": scores}, {"s": g.scores},
    )  # fmt: skip


def test_masked_entries_are_never_read():
    rng = np.random.default_rng(3)
    arrays, mask, _, d_out, d_lse, _ = setup(rng)
    mask[..., 2] = False
    bias = rng.normal(size=(N, T, S))
    clean = reference_attention(**arrays, mask=mask, bias=bias)
    clean_g = reference_gradients(**arrays, d_out=d_out, d_lse=d_lse, mask=mask, bias=bias)
    arrays["key"][:, 2], arrays["value"][:, 2], bias[..., 2] = np.nan, np.inf, np.nan
    nonfinite = reference_attention(**arrays, mask=mask, bias=bias)
    nonfinite_g = reference_gradients(**arrays, d_out=d_out, d_lse=d_lse, mask=mask, bias=bias)
    for x, y in zip((*clean, *clean_g[:4]), (*nonfinite, *nonfinite_g[:4]), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_bias_of_minus_infinity_masks():
    rng = np.random.default_rng(4)
    arrays, mask, _, d_out, _, _ = setup(rng)
    bias = np.where(mask, 0.0, -np.inf)
    for x, y in zip(
        reference_attention(**arrays, mask=mask),
        reference_attention(**arrays, bias=bias),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
    g = reference_gradients(**arrays, d_out=d_out, bias=bias)
    assert g.bias is not None
    assert np.all(g.bias[~mask] == 0)


def test_an_empty_row_is_zero():
    ref = reference_attention(
        np.ones((2, 1, 3)), np.ones((4, 1, 3)), np.ones((4, 1, 2)), mask=np.array([[False], [True]])
    )
    assert ref.out[:, 0].tolist() == [[0, 0], [1, 1]]
    assert ref.weights[0, 0].tolist() == [0, 0, 0, 0]
    assert ref.lse[0, 0] == -np.inf


@pytest.mark.parametrize(("t_len", "s_len"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(t_len, s_len):
    shapes = {"query": (2, t_len, 2, 3), "key": (2, s_len, 1, 3), "value": (2, s_len, 1, 5)}
    arrays: Any = {name: np.ones(shape) for name, shape in shapes.items()}
    ref = reference_attention(**arrays)
    assert ref.out.shape == (2, t_len, 2, 5)
    assert ref.weights.shape == (2, 2, t_len, s_len)
    assert np.all(ref.out == 0)
    g = reference_gradients(**arrays, d_out=np.ones((2, t_len, 2, 5)))
    assert {name: getattr(g, name).shape for name in shapes} == shapes


def test_grouped_heads_repeat():
    value = np.broadcast_to(np.arange(2.0)[:, None], (5, 2, 1))
    out = reference_attention(np.ones((1, 4, 2)), np.ones((5, 2, 2)), value).out
    np.testing.assert_allclose(out[0, :, 0], [0, 0, 1, 1])


@pytest.mark.parametrize("mask", [np.ones((4, 5)), np.ones((4, 5), int)])
def test_a_mask_of_numbers_raises(mask):
    with pytest.raises(TypeError, match="bias"):
        reference_attention(np.ones((4, 1, 2)), np.ones((5, 1, 2)), np.ones((5, 1, 2)), mask=mask)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": np.ones((4, 3))}, "query"),
        ({"key": np.ones((5, 3, 2))}, "S and K"),
        ({"key": np.ones((5, 3, 2)), "value": np.ones((5, 3, 2))}, "multiple"),
        ({"mask": np.ones((3, 5), bool)}, r"mask of shape \(3, 5\)"),
        ({"bias": np.ones((4, 4))}, r"bias of shape \(4, 4\)"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"score": "product"}, "product"),
        ({"score": "additive"}, "w_query"),
        ({"params": {"tau": 1.0}}, "tau"),
        ({"scale": np.ones(3)}, "N=4"),
    ],
)
def test_wrong_arguments_raise(change, words):
    arrays: Any = {
        "query": np.ones((4, 4, 2)),
        "key": np.ones((5, 2, 2)),
        "value": np.ones((5, 2, 2)),
    }
    with pytest.raises(ValueError, match=words):
        reference_attention(**{**arrays, **change})
