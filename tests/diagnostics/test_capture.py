"""The statistics of `capture` against the weights, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen
from attention_jax.attend import make_request
from attention_jax.diagnostics import attention_inputs, capture, diagnose, rollout
from attention_jax.diagnostics.row_statistics import attend_with_rows, is_causal
from attention_jax.nnx import (
    AdditiveAttention,
    MultiHeadAttention,
    Transformer,
    TransformerEncoder,
)

RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(1, 11, (3, 7)), RNG.integers(1, 11, (3, 5))
REAL = np.arange(7) < np.array([[7], [4], [2]])
MODEL = Transformer(1, 4, 16, 16, 11, 13, num_kv_heads=2, rngs=nnx.Rngs(0))
PATHS = [
    "encoder/layers/0/self_attention",
    "decoder/layers/0/self_attention",
    "decoder/layers/0/cross_attention",
]


@pytest.fixture(scope="module")
def found():
    return capture(
        MODEL,
        SOURCE,
        TARGET,
        source_mask=REAL,
        real={"encoder/*": REAL, "*cross*": REAL},
        weights=True,
        similarity=True,
        rollout=True,
    )


def check_rows(record, weights):
    """Compares every row statistic that follows from the weights."""
    p = np.asarray(weights, np.float64)
    T, S = p.shape[-2:]
    visible = (p > 0).sum(-1)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    jacobian = np.eye(S) * p[..., None] - p[..., None] * p[..., None, :]
    distance = np.arange(S) - np.arange(T)[:, None]
    wanted = {
        "entropy": entropy,
        "relative_entropy": np.where(visible > 1, entropy / np.log(np.maximum(visible, 2)), 0),
        "largest_weight": p.max(-1),
        "first_share": p[..., 0],
        "self_share": np.where(distance == 0, p, 0).sum(-1),
        "ahead_share": np.where(distance > 0, p, 0).sum(-1),
        "mean_key": (p * np.arange(S)).sum(-1) / max(S - 1, 1),
        "visible": visible,
        "jacobian_norm": np.linalg.norm(jacobian, axis=(-2, -1)),
        "logit_range": np.log(np.where(visible > 0, p.max(-1), 1) / np.where(p > 0, p, 1).min(-1)),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(getattr(record, name), value, rtol=1e-4, atol=2e-5, err_msg=name)


def test_records_are_in_order_of_execution_and_their_rows_match_the_weights(found):
    assert list(found) == PATHS
    both = jnp.asarray(SOURCE), jnp.asarray(TARGET), REAL
    plain, weights = nnx.jit(lambda m, *xs: (m(*xs), m.cross_attention_weights(*xs)))(MODEL, *both)
    np.testing.assert_allclose(found.output, plain, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[PATHS[2]].weights, weights[0], rtol=1e-4, atol=1e-6)
    for record in found.values():
        check_rows(record, record.weights)
    _, given = jax.jit(lambda *xs: attention_inputs(MODEL, *xs[:2], source_mask=xs[2]))(*both)
    assert set(given) == set(PATHS)
    inputs = given[PATHS[2]]
    weights = aj.attention_weights(inputs.query, inputs.key, score=inputs.score, mask=inputs.mask)
    np.testing.assert_allclose(found[PATHS[2]].weights, weights, rtol=1e-4, atol=1e-6)
    assert inputs.value.shape == (3, 7, 2, 4)
    cross = found[PATHS[2]]
    assert (np.asarray(cross.padding_share) < 1e-6).all()
    assert cross.counted is None
    assert found[PATHS[0]].counted.shape == (3, 4, 7)
    assert found[PATHS[1]].padding_share is None
    assert found[PATHS[1]].facts.mask == "causal()"
    assert (np.asarray(found[PATHS[1]].ahead_share) == 0).all()
    assert "decoder/layers/0/cross_attention" in str(found)


def test_similarity_of_heads_and_rollout_of_layers(found):
    for record in found.values():
        p = np.asarray(record.weights, np.float64)
        apart = p - (p > 0) / np.maximum((p > 0).sum(-1, keepdims=True), 1)
        products = np.einsum("bmts,bnts->bmn", apart, apart)
        length = np.sqrt(np.einsum("bnn->bn", products))
        cosines = products / (length[:, :, None] * length[:, None])
        np.testing.assert_allclose(record.similarity, cosines, atol=1e-4)
    first, second = RNG.dirichlet(np.ones(7), (2, 3, 7)).astype(np.float32)
    rolled = rollout({"a/0": first, "cross/0": second, "a/1": second})
    assert list(rolled) == ["a/*"]
    np.testing.assert_allclose(
        rolled["a/*"], (second + np.eye(7)) / 2 @ (first + np.eye(7)) / 2, atol=1e-5
    )
    assert list(found.rollout) == [path.replace("0", "*") for path in PATHS[:2]]
    mean = np.asarray(found[PATHS[0]].weights).mean(1)
    np.testing.assert_allclose(
        found.rollout["encoder/layers/*/self_attention"], (mean + np.eye(7)) / 2, atol=1e-5
    )


def test_several_blocks_give_the_same_statistics():
    shape = (2, 70, 2, 6)
    query, key, value = (RNG.normal(size=shape).astype(np.float32) for _ in range(3))
    mask = aj.masks.window(20, 7) & aj.masks.padding(jnp.array([70, 41]))
    real = np.arange(70) < np.array([[60], [41]])
    request = make_request(query, key, value, mask=mask, block_size=(32, 16))
    result, rows = jax.jit(lambda r: attend_with_rows(r, (real,)))(request)
    np.testing.assert_allclose(result.out, aj.attend(query, key, value, mask=mask), atol=1e-5)
    weights = np.asarray(aj.attention_weights(query, key, mask=mask))
    check_rows(rows, weights)
    share = (weights * real[:, None, None]).sum(-1)
    np.testing.assert_allclose(rows.real_share[..., 0], share, atol=1e-5)


def test_self_share_and_ahead_share_compare_positions():
    x = RNG.normal(size=(5, 1, 4)).astype(np.float32)
    at = {"query_positions": np.array([4, 2, 0, 9, 3]), "key_positions": np.array([3, 4, 4, 0, 7])}
    found = capture(lambda x: aj.attend(x, x, x, **at), x, weights=True)["attend"]
    distance = at["key_positions"] - at["query_positions"][:, None]
    weights = np.asarray(found.weights)
    np.testing.assert_allclose(found.self_share, (weights * (distance == 0)).sum(-1), atol=1e-6)
    np.testing.assert_allclose(found.ahead_share, (weights * (distance > 0)).sum(-1), atol=1e-6)


def test_gradient_norms_match_the_parameters_and_state_is_unchanged():
    layer = MultiHeadAttention(2, 8, score="cosine", rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    before = nnx.state(layer)

    def loss(out):
        return jnp.sum(jnp.square(out))

    found = capture(layer, x, mask=aj.masks.causal(), loss=loss)
    assert list(found) == ["MultiHeadAttention"]
    gradient = nnx.jit(nnx.grad(lambda m, x: loss(m(x, mask=aj.masks.causal()))))(layer, x)
    norms = found.gradient_norms["MultiHeadAttention"]
    for name in ("query", "key", "value", "out", "score"):
        total = sum(float((g**2).sum()) for g in jax.tree.leaves(gradient[name]))
        np.testing.assert_allclose(norms[name], np.sqrt(total), rtol=1e-3)
    assert all(int(n) == 0 for n in found.bad_gradients.values())
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)
    assert not jax.tree.leaves(nnx.state(layer, nnx.Intermediate))
    layer.out.kernel[0, 0, 0] = jnp.inf
    found = diagnose(capture(layer, x, mask=aj.masks.causal(), loss=loss))
    assert found.names == ("not_finite",)
    assert "gradients that are not finite" in str(found)


class Loop(nnx.Module):
    """Two layers, one under remat, in a compiled call."""

    def __init__(self):
        self.layer = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
        self.other = AdditiveAttention(8, 8, 4, rngs=nnx.Rngs(1))

    @nnx.jit
    def __call__(self, x):
        return nnx.remat(lambda layer, x: layer(x))(self.layer, x) + self.other(x, x)


def test_attention_inside_jit_and_remat_is_recorded_whether_traced_before_or_not():
    model, x = Loop(), RNG.normal(size=(2, 5, 8)).astype(np.float32)
    plain = model(x)
    found = capture(model, x, weights=True)
    assert list(found) == ["layer", "other"]
    np.testing.assert_allclose(found.output, plain, rtol=1e-5, atol=1e-6)
    check_rows(found["layer"], model.layer.attention_weights(x))
    np.testing.assert_array_equal(model(x), plain)  # without an observer again


def test_functions_with_two_calls_and_empty_axes():
    x = RNG.normal(size=(5, 2, 8)).astype(np.float32)

    def twice(x, *, causal):
        mask = aj.masks.causal() if causal else None
        return aj.attend(aj.attend(x, x, x, mask=mask), x, x)

    found = capture(twice, x, causal=True)
    assert list(found) == ["attend#0", "attend#1"]
    assert found["attend#0"].visible.tolist() == [[1, 2, 3, 4, 5]] * 2
    assert capture(twice, x, causal=False)["attend#0"].visible.tolist() == [[5] * 5] * 2
    empty = capture(twice, x[:0], causal=False)["attend#0"]
    assert empty.entropy.shape == (2, 0)


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="no attention of attention_jax ran"):
        capture(lambda x: x, np.ones(3))
    with pytest.raises(TypeError, match="model must be a Flax module or a function, got int"):
        capture(3)
    layer, x = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), np.ones((1, 3, 8), np.float32)
    with pytest.raises(TypeError, match="must be boolean"):
        capture(layer, x, real=np.ones((1, 3)))
    with pytest.raises(ValueError, match="'decoder/\\*' matches none of"):
        capture(layer, x, real={"decoder/*": np.ones((1, 3), bool)})
    with pytest.raises(ValueError, match="the model has none"):
        capture(lambda x: aj.attend(x, x, x), x[..., None], loss=jnp.sum)
    with pytest.raises(ValueError, match="variables are for Linen"):
        capture(layer, x, variables={})


def test_scanned_layers_have_indexed_paths():
    model = TransformerEncoder(2, 2, 8, 8, scan_layers=True, remat=True, rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    found = capture(model, x, weights=True)
    assert list(found) == ["layers/self_attention[0]", "layers/self_attention[1]"]
    for record in found.values():
        assert record.entropy.shape == (2, 2, 5)
        check_rows(record, record.weights)
    assert not np.allclose(*(r.entropy for r in found.values()))


@pytest.mark.parametrize("length", [5, 80])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"implementation": "dense"},
        {"implementation": "blockwise"},
        {"implementation": "flash", "block_size": 16},
        {"implementation": ("cudnn", "blockwise")},
        {"block_size": 16},
    ],
    ids=str,
)
def test_the_recorded_implementation_is_the_one_that_runs(options, length):
    x = RNG.normal(size=(2, length, 2, 4)).astype(np.float32)
    mask = aj.masks.causal()
    bias = RNG.normal(size=(length, length)).astype(np.float32)

    def model(x):
        return aj.attend(x, x, x, mask=mask, bias=bias, **options)

    plan = aj.explain(x, x, x, mask=mask, bias=bias, **options)
    assert capture(model, x)["attend"].facts.implementation == plan.implementation


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_a_layer_s_implementation_is_recorded(implementation):
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    layer = MultiHeadAttention(2, 8, implementation=implementation, rngs=nnx.Rngs(0))
    assert capture(layer, x)["MultiHeadAttention"].facts.implementation == implementation
    layer = linen.MultiHeadAttention(num_heads=2, implementation=implementation)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    found = capture(layer, x, variables=variables)
    assert found["MultiHeadAttention"].facts.implementation == implementation


def test_an_implementation_that_cannot_do_the_request_is_refused():
    x = RNG.normal(size=(5, 2, 4)).astype(np.float32)
    with pytest.raises(NotImplementedError, match="'dense': "):
        capture(lambda x: aj.attend(x, x, x, implementation="dense", block_size=2), x)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (None, False),
        (aj.masks.causal(), True),
        (aj.masks.window(3, 0), True),
        (aj.masks.window(3, 1), False),
        (aj.masks.causal() & aj.masks.window(4, 4), True),
        (aj.masks.causal() | aj.masks.prefix(2), False),
        (aj.masks.causal(align="end"), False),
        (~aj.masks.causal(), False),
        (np.tri(5, dtype=bool), False),
    ],
    ids=str,
)
def test_masks_are_causal_by_their_interval(mask, causal):
    x = np.zeros((5, 1, 4), np.float32)
    assert is_causal(make_request(x, x, x, mask=mask).mask) is causal
