"""The conformance suite accepts a correct attention and reports errors with their case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.testing import FEATURES, check_attention
from attention_jax.testing.conformance_cases import CASES

BASIC = {"mask", "bias", "lengths", "grouped_heads", "value_depth", "gradients", "bias_gradient"}


def plain(query, key, value, *, mask=None, bias=None):
    group = query.shape[-2] // key.shape[-2]
    key, value = jnp.repeat(key, group, axis=-2), jnp.repeat(value, group, axis=-2)
    logits = jnp.einsum("...tnh,...snh->...nts", query, key) / query.shape[-1] ** 0.5
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, -1e30)
    return jnp.einsum("...nts,...snv->...tnv", jax.nn.softmax(logits), value)


def no_bias_gradient(query, key, value, *, mask=None, bias=None):
    return plain(query, key, value, mask=mask, bias=jax.lax.stop_gradient(bias))


def tiled_heads(query, key, value, **kw):
    group = query.shape[-2] // key.shape[-2]
    return plain(query, jnp.tile(key, (1, 1, group, 1)), jnp.tile(value, (1, 1, group, 1)), **kw)


def wrong_scale(query, key, value, **kw):
    return plain(query * (query.shape[-1] / value.shape[-1]) ** 0.5, key, value, **kw)


def ignores_mask(query, key, value, *, mask=None, bias=None):
    return plain(query, key, value, bias=bias)


def wrong_dtype(query, key, value, **kw):
    return plain(query, key, value, **kw).astype(jnp.bfloat16)


def test_a_correct_attention_passes_and_the_cases_are_returned():
    names = check_attention(plain, BASIC, only="values")
    assert names == ["values", "values with a mask", "values with a bias"]


@pytest.mark.parametrize(
    ("f", "case", "words"),
    [
        (no_bias_gradient, "values with a bias", "gradient of bias: max error"),
        (tiled_heads, "values", "out: max error"),
        (wrong_scale, "values", "out: max error"),
        (ignores_mask, "values with a mask", "out: max error"),
        (wrong_dtype, "values", "dtype bfloat16, expected float32"),
        (lambda query, key, value: query, "values", "has shape"),
        (lambda query, key, value: 1 / 0, "values", "ZeroDivisionError"),
    ],
)
def test_errors_are_reported_with_their_case(f, case, words):
    with pytest.raises(AssertionError) as failure:
        check_attention(f, BASIC, only="values")
    assert f"\n  {case}: " in str(failure.value)
    assert words in str(failure.value)


def test_wrong_empty_rows_and_masked_nan_are_found():
    with pytest.raises(AssertionError, match="empty rows: out: max error"):
        check_attention(plain, BASIC | {"empty_rows"}, only="empty rows")
    with pytest.raises(AssertionError, match=r"NaN in masked entries: poison"):
        check_attention(plain, BASIC | {"hidden_nan"}, only="NaN")


def test_dropout_shared_over_queries_is_found():
    def dropping(query, key, value, *, dropout_rate, dropout_key, shared):
        shape = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        kept = jax.random.bernoulli(
            dropout_key, 1 - dropout_rate, (*shape[:-2], 1, shape[-1]) if shared else shape
        )
        group = query.shape[-2] // key.shape[-2]
        key, value = jnp.repeat(key, group, axis=-2), jnp.repeat(value, group, axis=-2)
        logits = jnp.einsum("...tnh,...snh->...nts", query, key) / query.shape[-1] ** 0.5
        weights = jnp.where(kept, jax.nn.softmax(logits) / (1 - dropout_rate), 0)
        return jnp.einsum("...nts,...snv->...tnv", weights, value)

    def f(shared):
        return lambda query, key, value, **kw: dropping(query, key, value, shared=shared, **kw)

    assert check_attention(f(False), BASIC | {"dropout"}, only="dropout") == ["dropout"]
    with pytest.raises(AssertionError, match="dropout masks of one query and the next agree"):
        check_attention(f(True), BASIC | {"dropout"}, only="dropout")


@pytest.mark.parametrize(
    ("supports", "more", "words"),
    [
        ({"masks", "speed"}, {}, "speed"),
        ({"scores"}, {}, "scores=attention_jax.scores"),
        ({"masks"}, {}, "masks=attention_jax.masks"),
        ({"positions"}, {}, "needs 'masks'"),
        (set(), {"only": "no such case"}, "no such case"),
    ],
)
def test_wrong_arguments_raise(supports, more, words):
    with pytest.raises(ValueError, match=words):
        check_attention(plain, supports, **more)


def test_cases_have_unique_names_and_known_features():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set().union(*(case.needs for case in CASES)) <= set(FEATURES)


def test_tolerances_are_configurable():
    def rough(*args, **kw):
        return plain(*args, **kw) * np.float32(1.001)

    supports = BASIC - {"gradients", "bias_gradient"}
    assert check_attention(rough, supports, tolerances={"float32": (2e-3, 0.0)}, only="values")
    with pytest.raises(AssertionError, match="values: out"):
        check_attention(rough, supports, only="values")
