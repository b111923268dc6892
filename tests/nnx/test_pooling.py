"""Attention pooling and graph attention, against the formulas of their papers written out."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import AttentionPooling, GraphAttention

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 7, 6)).astype(np.float32)
THERE = np.arange(7) < np.array([[7], [4]])


def _softmax(e, allowed):
    p = np.where(allowed, np.exp(e), 0.0)
    total = p.sum(-1, keepdims=True)
    return np.divide(p, total, out=np.zeros_like(p), where=total > 0)


def _pooled(layer, x, there):
    """Ilse et al., eq. 8-9, in float64; several queries at once."""
    w, b = (np.asarray(p[...], np.float64) for p in (layer.key.kernel, layer.key.bias))
    queries, hidden = np.asarray(layer.queries[...], np.float64), x @ w + b
    hidden = hidden / np.sqrt(hidden.shape[-1]) if layer.kind == "dot" else np.tanh(hidden)
    if layer.kind == "gated":
        u, c = (np.asarray(p[...], np.float64) for p in (layer.gate.kernel, layer.gate.bias))
        hidden = hidden / (1 + np.exp(-(x @ u + c)))
    weights = _softmax(np.einsum("qa,bsa->bqs", queries, hidden), there[:, None])
    return weights, weights @ x


@pytest.mark.parametrize(("score", "queries"), [("dot", 3), ("additive", 2), ("gated", 1)])
def test_pooling_is_the_paper_s(score, queries):
    layer = AttentionPooling(
        6, 4, queries, score=score, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0)
    )
    weights, out = _pooled(layer, X.astype(np.float64), THERE)
    spoiled = jnp.asarray(np.where(THERE[..., None], X, np.nan))

    @nnx.jit
    def run(layer, x, there):
        def loss(layer):
            return jnp.sum(layer(x, there) ** 2)

        by_length = layer(x, aj.masks.padding(jnp.array([7, 4])))
        found = (layer(x, there), by_length), layer.attention_weights(x, there)
        return found, nnx.grad(loss)(layer)

    (outs, found), gradients = run(layer, spoiled, THERE)
    for each in outs:
        np.testing.assert_allclose(each, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    leaves = [leaf for _, leaf in nnx.to_flat_state(gradients)]
    assert all(bool(jnp.isfinite(leaf[...]).all()) for leaf in leaves)
    assert all(float(jnp.abs(leaf[...]).max()) > 0 for leaf in leaves if leaf[...].shape != (4,))
    assert layer(X[0, :0]).shape == (queries, 6)


def _gat(layer, x, allowed, bias):
    """Brody et al., eq. 7, in float64."""
    source, target = (
        np.einsum("btd,dna->btna", x, np.asarray(w.kernel[...], np.float64))
        for w in (layer.source, layer.target)
    )
    pre = target[:, :, None] + source[:, None]
    v = np.asarray(layer.score.v[...], np.float64)
    e = np.einsum("btsna,na->bnts", np.where(pre > 0, pre, 0.2 * pre), v) + bias
    weights = _softmax(e, allowed)
    return weights, np.einsum("bnts,bsna->btna", weights, source)


@pytest.mark.parametrize("join", ["concat", "mean"])
def test_graph_attention_is_the_paper_s(join):
    layer = GraphAttention(6, 3, 2, join=join, self_loops=join == "concat", rngs=nnx.Rngs(0))
    edges = RNG.random((2, 7, 7)) < 0.3
    edges[0, 2] = False  # a node that sees nobody, but for its loop
    bias = RNG.normal(size=(2, 2, 7, 7)).astype(np.float32)
    seen = edges | np.eye(7, dtype=bool) if layer.self_loops else edges
    weights, heads = _gat(layer, X.astype(np.float64), seen[:, None], bias)
    out = heads.reshape(2, 7, 6) if join == "concat" else heads.mean(-2)

    @nnx.jit
    def run(layer, x, edges):
        same = layer(x, edges[:, None], edge_bias=bias)
        return (
            layer(x, edges, edge_bias=bias),
            same,
            layer.attention_weights(x, edges, edge_bias=bias),
        )

    found, same, shown = run(layer, X, edges)
    np.testing.assert_allclose(found, out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(same, found, rtol=1e-6)
    np.testing.assert_allclose(shown, weights, rtol=1e-4, atol=1e-5)
    if join == "concat":
        packed = layer(X[0], aj.masks.segments(np.array([0, 0, 0, 1, 1, 1, 1])))
        np.testing.assert_allclose(packed[:3], layer(X[0, :3]), rtol=1e-4, atol=1e-5)
    assert layer(X[:, :0]).shape == (2, 0, out.shape[-1])  # a graph without nodes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AttentionPooling(6, 0, rngs=nnx.Rngs(0)), ["hidden_features", "0"]),
        (lambda: AttentionPooling(6, 4, score="max", rngs=nnx.Rngs(0)), ["'gated'", "'max'"]),
        (lambda: AttentionPooling(6, 4, rngs=nnx.Rngs(0))(X[..., :5]), ["6", "5"]),
        (lambda: AttentionPooling(6, 4, rngs=nnx.Rngs(0))(X, THERE[:, :3]), ["mask", "[2, 3]"]),
        (lambda: GraphAttention(6, 3, join="sum", rngs=nnx.Rngs(0)), ["join", "'sum'"]),
        (lambda: GraphAttention(6, 3, negative_slope=-1, rngs=nnx.Rngs(0)), ["slope", "-1"]),
        (lambda: GraphAttention(6, 3, rngs=nnx.Rngs(0))(X, THERE[0]), ["adjacency", "[7]"]),
        (
            lambda: GraphAttention(6, 3, dropout_rate=0.5, rngs=nnx.Rngs(0))(X),
            ["GraphAttention", "deterministic"],
        ),
    ],
)
def test_bad_use(make, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the words are checked below)
        make()
    for word in words:
        assert word in str(raised.value)
