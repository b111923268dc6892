"""Attention pooling and graph attention, against the formulas of their papers written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 6)).astype(np.float32)
THERE = np.arange(7) < np.array([[7], [4]])


def _softmax(e, allowed):
    p = np.where(allowed, np.exp(e), 0.0)
    total = p.sum(-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def _pooled(params, score, x, there):
    """Ilse et al., eq. 8-9, in float64; several queries at once."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    queries, hidden = params["queries"], x @ params["key"]["kernel"] + params["key"]["bias"]
    hidden = hidden / np.sqrt(hidden.shape[-1]) if score == "dot" else np.tanh(hidden)
    if score == "gated":
        gate = params["gate"]
        hidden = hidden / (1 + np.exp(-(x @ gate["kernel"] + gate["bias"])))
    weights = _softmax(np.einsum("qa,bsa->bqs", queries, hidden), there[:, None])
    return weights, weights @ x


@pytest.mark.parametrize(("score", "queries"), [("dot", 3), ("additive", 2), ("gated", 1)])
def test_pooling_is_the_paper_s(flavour, score, queries):
    init = nnx.initializers.normal()
    options = {"score": score, "bias_init": init, "inputs": (X,)}
    layer = flavour.layer("AttentionPooling", 6, 4, queries, **options)
    weights, out = _pooled(layer.params, score, X.astype(np.float64), THERE)
    masked = jnp.asarray(np.where(THERE[..., None], X, np.nan))

    @jax.jit
    def run(variables, x, there):
        def loss(variables):
            return jnp.sum(layer.apply(variables, x, there) ** 2)

        by_length = layer.apply(variables, x, aj.masks.padding(jnp.array([7, 4])))
        outs = layer.apply(variables, x, there), by_length
        found = outs, layer.apply(variables, x, there, method="attention_weights")
        return found, jax.grad(loss)(variables)

    (outs, found), gradients = run(layer.variables, masked, THERE)
    for each in outs:
        np.testing.assert_allclose(each, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    leaves = jax.tree.leaves(gradients)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in leaves if leaf.shape != (4,))
    assert layer(X[0, :0]).shape == (queries, 6)


def _gat(params, x, allowed, bias):
    """Brody et al., eq. 7, in float64."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    source, target = (
        np.einsum("btd,dna->btna", x, params[name]["kernel"]) for name in ("source", "target")
    )
    pre = target[:, :, None] + source[:, None]
    leaky = np.where(pre > 0, pre, 0.2 * pre)
    e = np.einsum("btsna,na->bnts", leaky, params["score"]["v"]) + bias
    weights = _softmax(e, allowed)
    return weights, np.einsum("bnts,bsna->btna", weights, source)


@pytest.mark.parametrize("join", ["concat", "mean"])
def test_graph_attention_is_the_paper_s(flavour, join):
    self_loops = join == "concat"
    options = {"join": join, "self_loops": self_loops, "inputs": (X,)}
    layer = flavour.layer("GraphAttention", 6, 3, 2, **options)
    edges = RNG.random((2, 7, 7)) < 0.3
    edges[0, 2] = False  # a node without neighbours, but for its loop
    bias = RNG.normal(size=(2, 2, 7, 7)).astype(np.float32)
    seen = edges | np.eye(7, dtype=bool) if self_loops else edges
    weights, heads = _gat(layer.params, X.astype(np.float64), seen[:, None], bias)
    out = heads.reshape(2, 7, 6) if join == "concat" else heads.mean(-2)

    found = layer(X, edges, edge_bias=bias)
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
    same = layer(X, edges[:, None], edge_bias=bias)
    np.testing.assert_allclose(same, found, rtol=1e-6)
    shown = layer(X, edges, edge_bias=bias, method="attention_weights")
    np.testing.assert_allclose(shown, weights, rtol=1e-4, atol=1e-5)
    if join == "concat":
        packed = layer(X[0], aj.masks.segments(np.array([0, 0, 0, 1, 1, 1, 1])))
        np.testing.assert_allclose(packed[:3], layer(X[0, :3]), rtol=1e-4, atol=1e-5)
    assert layer(X[:, :0]).shape == (2, 0, out.shape[-1])  # a graph without nodes


@pytest.mark.parametrize(
    ("name", "args", "options", "call", "words"),
    [
        ("AttentionPooling", (6, 0), {}, None, ["hidden_features", "0"]),
        ("AttentionPooling", (6, 4), {"score": "max"}, None, ["'gated'", "'max'"]),
        ("AttentionPooling", (6, 4), {}, (X[..., :5],), ["6", "5"]),
        ("AttentionPooling", (6, 4), {}, (X, THERE[:, :3]), ["mask", "[2, 3]"]),
        ("GraphAttention", (6, 3), {"join": "sum"}, None, ["join", "'sum'"]),
        ("GraphAttention", (6, 3), {"negative_slope": -1}, None, ["slope", "-1"]),
        ("GraphAttention", (6, 3), {}, (X, THERE[0]), ["adjacency", "[7]"]),
        ("GraphAttention", (6, 3), {"dropout_rate": 0.5}, (X,), ["GraphAttention", "determin"]),
    ],
)
def test_bad_use(flavour, name, args, options, call, words):
    how = {"deterministic": True}

    def make():
        layer = flavour.layer(name, *args, inputs=(X,), how=how, **options)
        return layer(*call)

    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
        make()
    for word in words:
        assert word in str(raised.value)
