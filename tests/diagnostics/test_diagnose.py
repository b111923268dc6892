"""Each rule finds its fault in a small model, and finds nothing in a model without faults."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.diagnostics import Diagnosis, capture, diagnose
from attention_jax.nnx import MultiHeadAttention, TransformerEncoder

RNG = np.random.default_rng(0)
B, T, D = 3, 12, 64
X = RNG.normal(size=(B, T, D)).astype(np.float32)
REAL = np.arange(T) < np.array([[12], [9], [7]])
GOOD = np.tril(np.ones((T, T), bool)) & REAL[:, None, None]
PATH = "layers/1/self_attention"


def model():
    return TransformerEncoder(2, 4, D, 32, rngs=nnx.Rngs(0))


def attention(model):
    return model.layers[1].self_attention


def examine(model, mask=GOOD, causal="*", **options):
    """All faults share one compiled program: only arrays differ."""
    found = capture(model, X, mask, **(options or {"real": REAL, "similarity": True}))
    return diagnose(found, causal=causal)


def test_a_model_without_faults_has_no_finding():
    found = examine(model())
    assert not found, str(found)
    assert found.examined == 2
    assert str(found) == "nothing found in 2 attentions"
    assert not examine(model(), similarity=False)


def test_left_padding_is_no_fault_and_an_empty_first_row_is():
    in_front = np.ascontiguousarray(np.flip(REAL, 1)[:, None, None]) & np.tril(
        np.ones((T, T), bool)
    )
    assert not examine(model(), in_front, similarity=False)
    strictly = np.broadcast_to(np.tril(np.ones((T, T), bool), -1), GOOD.shape)
    found = examine(model(), np.ascontiguousarray(strictly), similarity=False)
    assert found.names == ("mask_hides_all",), str(found)
    assert "12 of 144 rows" in str(found)


def scale_query_and_key(model):
    for part in (attention(model).query, attention(model).key):
        part.kernel[...] = part.kernel[...] * 0.01


def one_key_for_all(model):
    layer = attention(model)
    layer.query.bias[...] = layer.query.bias[...] + 40.0


def copy_a_head(model):
    for part in (attention(model).query, attention(model).key):
        part.kernel[...] = part.kernel[...].at[:, 3].set(part.kernel[:, 1])


def zero_the_values_of_a_head(model):
    layer = attention(model)
    layer.value.kernel[...] = layer.value.kernel[...].at[:, 2].set(0.0)


def zero_the_projection_of_a_head(model):
    layer = attention(model)
    layer.out.kernel[...] = layer.out.kernel[...].at[2].set(0.0)


def saturate(model):
    for part in (attention(model).query, attention(model).key):
        part.kernel[...] = part.kernel[...] * 30.0


def insert_nan(model):
    layer = attention(model)
    layer.query.kernel[...] = layer.query.kernel[...].at[0, 0, 0].set(jnp.nan)


FAULTS = {
    "too_even": (scale_query_and_key, ["entropy 1.0000 of ln n", "kernel_init="]),
    "collapsed": (one_key_for_all, ["one and the same key", "largest weight", "normalize_qk=True"]),
    "duplicate_heads": (copy_a_head, ["heads 1 and 3", "num_heads=3"]),
    "dead_heads": (zero_the_values_of_a_head, ["head 2", "'layers/1/self_attention': [2]"]),
    "dead_heads, projection": (zero_the_projection_of_a_head, ["head 2", "output projection"]),
    "collapsed, saturated": (saturate, ["no gradient passes the softmax", "kernel_init="]),
}
PLAIN = {"similarity": False}


@pytest.mark.parametrize(
    ("fault", "options"), [*((name, {}) for name in FAULTS), ("duplicate_heads", PLAIN)]
)
def test_a_fault_of_the_parameters_is_found_in_its_layer(fault, options):
    name, (change, words) = fault.split(",")[0], FAULTS[fault]
    faulty = model()
    change(faulty)
    found = examine(faulty, **options)
    assert found.names == (name,), str(found)
    (finding,) = found
    assert finding.where == PATH
    for word in words:
        assert word in str(found)
    assert all(getattr(finding, part) for part in ("symptom", "evidence", "cause", "remedy"))
    assert finding.numbers


def test_nan_is_reported_once_where_it_arises():
    faulty = model()
    insert_nan(faulty)
    found = examine(faulty)
    assert found.names == ("not_finite",)
    assert found.findings[0].where == PATH
    assert "float32" in found.findings[0].evidence


@pytest.mark.parametrize(
    ("name", "mask", "words"),
    [
        ("look_ahead", np.broadcast_to(REAL[:, None, None], GOOD.shape), "masks.causal()"),
        ("padding_attended", np.ones((B, 1, T, T), bool), "key_lengths"),
        ("mask_hides_all", GOOD & (np.arange(T) > 2), "masks that leave nothing"),
        ("mask_hides_all", GOOD & (np.arange(B) != 1)[:, None, None, None], "36 of 112 rows"),
    ],
)
def test_a_wrong_mask_is_found(name, mask, words):
    causal = () if name == "padding_attended" else "*"
    found = examine(model(), np.ascontiguousarray(mask), causal)
    assert found.names == (name,), str(found)
    assert len(found) == 2  # both layers
    assert words in str(found)


@pytest.mark.parametrize(
    ("name", "score", "words"),
    [
        ("no_scale", "dot", ["H = 32", 'score="scaled_dot"']),
        ("no_scale", aj.scores.soft_cap(aj.scores.dot(), 50.0), ["H = 32", "soft_cap"]),
        ("double_scale", aj.scores.scaled_dot(1 / 32), ["once too often", "1/√H is 0.1768"]),
    ],
)
def test_a_wrong_scale_is_found(name, score, words):
    layer = MultiHeadAttention(2, D, score=score, rngs=nnx.Rngs(0))
    found = diagnose(capture(layer, X))
    assert found.names == (name,), str(found)
    assert all(word in str(found) for word in words)
    assert len(found.left_out) == 2


def test_queries_scaled_before_the_score_are_found():
    found = diagnose(capture(lambda x, y: aj.attend(x / 8, y, y), X[:, :, None], X[::-1, :, None]))
    assert found.names == ("double_scale",), str(found)
    assert "scaled before the score" in str(found)


def test_half_precision_near_overflow_is_found():
    layer = MultiHeadAttention(2, D, dtype=jnp.float16, rngs=nnx.Rngs(0))
    layer.value.kernel[...] = layer.value.kernel[...] * 6000
    found = diagnose(capture(layer, X))
    assert found.names == ("near_overflow",), str(found)
    assert "jnp.bfloat16" in str(found)
    layer.value.kernel[...] = layer.value.kernel[...] * 10
    found = diagnose(capture(layer, X))
    assert found.names == ("not_finite",), str(found)
    assert "float16" in str(found)


def test_attention_that_is_diluted_on_long_inputs_is_found():
    def matching(x):
        return aj.attend(x, x, x, score=aj.scores.cosine(4.0))

    short, long = (
        capture(matching, RNG.normal(size=(n, 1, 64)).astype(np.float32)) for n in (8, 400)
    )
    assert not diagnose(short), str(diagnose(short))
    found = diagnose(short, long)
    assert found.names == ("long_sequence_decay",), str(found)
    assert "log_length" in str(found)


def history(entropies, logits, bad=0):
    rows = []
    for step, (entropy, logit) in enumerate(zip(entropies, logits, strict=True)):
        fields = {"entropy": entropy, "max_logit": logit, "gradient_norm": 1.0, "bad": 0.0}
        rows.append({"step": 10 * step, "attention": {"a": fields, "b": dict(fields)}})
    if bad:
        rows[bad]["attention"]["b"]["gradient_norm"] = None
    return rows


def test_a_history_shows_collapse_and_the_first_step_that_is_not_finite():
    falling = np.geomspace(2.0, 0.01, 12)
    found = diagnose(history=history(falling, np.linspace(1, 60, 12)))
    assert found.names == ("entropy_collapse",)
    assert [finding.where for finding in found] == ["a", "b"]
    assert "below a tenth from step 50" in str(found)
    # sharp attention of a model that has learnt is no fault, unless its loss rises again
    rows = history(falling, np.linspace(1, 60, 12))
    losses = np.geomspace(4.0, 0.01, 12)
    learnt, diverged = (
        [{**row, "loss": x} for row, x in zip(rows, curve, strict=True)]
        for curve in (losses, [*losses[:-2], 3.0, 3.5])
    )
    assert not diagnose(history=learnt)
    assert diagnose(history=diverged).names == ("entropy_collapse",)
    # nor is sharp attention with moderate logits
    assert not diagnose(history=history(falling, np.linspace(1, 8, 12)))
    found = diagnose(history=history([2.0] * 5, [1.0] * 5, bad=3))
    assert found.names == ("not_finite",)
    assert found.findings[0].numbers == {"step": 30, "quantity": "gradient_norm"}
    assert found.findings[0].where == "b"


def test_wrong_arguments_raise_and_an_empty_diagnosis_prints():
    with pytest.raises(ValueError, match="needs a capture"):
        diagnose()
    with pytest.raises(TypeError, match="takes captures, got dict"):
        diagnose({})
    assert str(Diagnosis((), 3, ("x",))) == "nothing found in 3 attentions\n\nnot examined: x"
    assert not diagnose(history=[])
