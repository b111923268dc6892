"""Flax's table of every module, with the costs of calls and their derivatives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax import linen

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = jnp.ones((2, 6, 8))
IDS = jnp.ones((2, 6), int)
SIZES = (2, 8, 16)


def _attention(**options):
    return linen.MultiHeadAttention(2, **options)


SCORES = {
    name: _attention(score=name)
    for name in ("dot", "scaled_dot", "general", "additive", "concat", "cosine")
} | {
    "shared": _attention(score=linen.additive(4, shared=True), dtype=jnp.bfloat16),
    "learned_scale": _attention(score=linen.learned_scale(), dtype=jnp.bfloat16),
    "entropy_scale": _attention(score=linen.entropy_scale(1.0), deterministic=False),
    "log_length": _attention(score=linen.log_length(train_length=8, learn=True)),
    "object": _attention(score=aj.scores.general(jnp.ones((2, 4, 4)))),
    "factory": _attention(score=lambda heads, depth, key: aj.scores.cosine(jnp.ones(heads))),
    "positions": _attention(positions="relative_bias", score="additive"),
    "shaw": _attention(positions="shaw"),
    "options": _attention(positions="rotary", fused_qkv=True, normalize_qk=True, num_kv_heads=1),
    "decode": _attention(decode=True),
}
PAIR, TOKENS = (X, X), (IDS, IDS)
MODULES = {
    "AdditiveAttention": (linen.AdditiveAttention(8, 8, 4), PAIR),
    "AttentionPooling": (linen.AttentionPooling(8, 4), (X,)),
    "FeedForward": (linen.FeedForward(8, 16), (X,)),
    "GraphAttention": (linen.GraphAttention(8, 4, 2), (X[0], jnp.ones((6, 6), bool))),
    "MeanAttention": (linen.MeanAttention(8), PAIR),
    "LinearAttention": (linen.LinearAttention(2), (X,)),
    "LowRankAttention": (linen.LowRankAttention(2, length=6, rank=2), (X,)),
    "NystromAttention": (linen.NystromAttention(2), (X,)),
    "LSHAttention": (linen.LSHAttention(2), (X,)),
    "MemoryCompressedAttention": (linen.MemoryCompressedAttention(2), (X,)),
    "RoutedAttention": (linen.RoutedAttention(2), (X,)),
    "TransformerEncoderLayer": (linen.TransformerEncoderLayer(*SIZES, score="additive"), (X,)),
    "TransformerDecoderLayer": (
        linen.TransformerDecoderLayer(*SIZES, score="cosine", cross_score="additive"),
        PAIR,
    ),
    "TransformerEncoder": (linen.TransformerEncoder(2, *SIZES, norm="pre", remat=True), (X,)),
    "scanned": (linen.TransformerEncoder(2, *SIZES, scan_layers=True, score="general"), (X,)),
    "TransformerDecoder": (linen.TransformerDecoder(1, *SIZES, cross_attention="mean"), PAIR),
    "TransformerLM": (linen.TransformerLM(1, *SIZES, 9, score="additive"), (IDS,)),
    "Transformer": (
        linen.Transformer(1, *SIZES, 9, 9, positions="learned", max_length=6, score="concat"),
        TOKENS,
    ),
}


def _table(module, *inputs, **options):
    costs = {"compute_flops": True, "compute_vjp_flops": True}
    return module.tabulate(KEYS, *inputs, console_kwargs={"width": 400}, **costs, **options)


def test_every_public_module_is_here():
    public = {name for name, x in vars(linen).items() if isinstance(x, type)}
    assert public <= {*MODULES, "MultiHeadAttention"}


@pytest.mark.parametrize("name", SCORES)
def test_scores_and_positions(name):
    table = _table(SCORES[name], X)
    assert "vjp_flops" in table
    assert "score" in table


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module, inputs = MODULES[name]
    assert type(module).__name__ in _table(module, *inputs)


@pytest.mark.thorough
def test_every_call_is_counted_where_it_is_asked_for():
    module = linen.TransformerLM(1, *SIZES, 9, score="additive", positions="relative_bias")
    assert _table(module, IDS, show_repeated=True).count("ScoreParameters") > 1


@pytest.mark.thorough
def test_other_methods_arguments_and_places():
    layer = _attention(in_features=8, score="additive", dropout_rate=0.5)
    mask = aj.masks.padding(jnp.array([6, 3])) & aj.masks.causal()
    _table(layer, X, mask=mask, bias=aj.positions.alibi(2), deterministic=False)
    for method in ("with_stats", "attention_weights", "new_memory_cache"):
        options = {"deterministic": True} if method == "with_stats" else {}
        _table(layer, X, method=method, **options)
    cache = layer.new_cache(2, 8)
    _table(layer, X, cache, method="with_cache", deterministic=True)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(_attention(score="additive", fused_qkv=True)(x))

    assert "MultiHeadAttention" in _table(Outer(), X)
