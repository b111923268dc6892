"""Wrong arguments are refused in both flavours: settings at construction, inputs in the call."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax import nnx
from attention_jax.cache import KVCache
from attention_jax.layers.caches import check_batch

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32)
MODEL = {"num_layers": 1, "num_heads": 2, "features": 8, "mlp_features": 16}
WORDS = {"source_vocab": 5, "target_vocab": 6}
ATTENTION = [
    ((3, 8), {}, ["qkv_features 8", "num_heads 3", "(D)", "(N)"]),
    ((2, 8, 9), {}, ["qkv_features 9", "num_heads 2"]),
    ((6, 12), {"num_kv_heads": 4}, ["num_heads 6", "num_kv_heads 4", "(K)"]),
    ((0, 8), {}, ["num_heads", "0"]),
    ((2, 8), {"num_kv_heads": 0}, ["num_kv_heads", "0"]),
    ((2, 8), {"dropout_rate": 1.0}, ["dropout_rate", "[0, 1)", "1.0"]),
    ((2, 8), {"dropout_rate": -0.1}, ["dropout_rate", "-0.1"]),
    ((2, 8), {"score": "bilinear"},
     ["'bilinear'", "dot", "scaled_dot", "general", "additive", "concat", "cosine"]),
    ((2, 8), {"positions": "absolute"}, ["'absolute'", "rotary"]),
    ((2, 8), {"implementation": "xla"}, ["implementation", "'xla'", "'dense'"]),
    ((2, 8), {"implementation": ()}, ["implementation", "empty"]),
    ((2, 6), {"positions": "rotary"}, ["3"]),
    ((2, 8), {"value_features": 5}, ["value_features 5", "num_heads 2"]),
    ((2, 8), {"in_kv_features": 4, "fused_qkv": True}, ["fused_qkv", "8", "4"]),
]  # fmt: skip
SETTINGS = [
    *(("MultiHeadAttention", *case) for case in ATTENTION),
    ("AdditiveAttention", (4, 4, 0), {}, ["hidden_features", "0"]),
    ("AdditiveAttention", (4, 4, 3), {"dropout_rate": 2.0}, ["dropout_rate", "2.0"]),
    ("MeanAttention", (8,), {"implementation": ("dense", "xla")}, ["implementation", "'xla'"]),
    ("TransformerEncoderLayer", (2, 8, 16), {"norm": "middle"},
     ["norm", "'post'", "'pre'", "'middle'"]),
    ("TransformerEncoderLayer", (2, 8, 16), {"dropout_rate": 1.5}, ["dropout_rate", "1.5"]),
    ("TransformerDecoderLayer", (2, 8, 16), {"cross_attention": "none"},
     ["cross_attention", "'attention'", "'mean'", "'none'"]),
    ("TransformerDecoderLayer", (2, 8, 16), {"cross_attention": "mean", "cross_score": "dot"},
     ["cross_score", "mean"]),
    ("TransformerDecoder", (0, 2, 8, 16), {}, ["num_layers", "0"]),
    ("Transformer", (), {**MODEL, **WORDS, "cross_attention": "mean", "cross_score": "dot"},
     ["cross_score", "mean"]),
    ("Transformer", (), {**MODEL, **WORDS, "share_embedding": True},
     ["source_vocab 5", "target_vocab 6"]),
    ("Transformer", (), {**MODEL, **WORDS, "target_vocab": 0}, ["target_vocab", "0"]),
    ("Transformer", (), {**MODEL, **WORDS, "positions": "learned"}, ["max_length"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "positions": "learned"}, ["max_length"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "max_length": 4}, ["max_length", "sinusoidal"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "remat": "some"}, ["'some'", "dots_saveable"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "dropout_rate": 1.0}, ["[0, 1)"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "num_heads": 8, "positions": "rotary"}, ["even"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "num_heads": 3}, ["8", "3"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "value_features": 3}, ["value_features"]),
    ("TransformerLM", (), {**MODEL, "vocab": 0}, ["vocab"]),
]  # fmt: skip
KINDS = [
    ("MultiHeadAttention", (2, 8), {"score": 3.0}, ["score", "float"]),
    ("MultiHeadAttention", (2, 8), {"mask": jnp.ones((5, 5))}, ["bias"]),
    ("MultiHeadAttention", (2, 8), {"mask": jnp.ones((5, 5), int)}, ["bias"]),
    ("MultiHeadAttention", (2.0, 8), {}, ["num_heads", "float"]),
    ("MultiHeadAttention", (2, 8), {"mistake": 1}, ["mistake"]),
    ("TransformerEncoderLayer", (2, 8, 16), {"mistake": 1}, ["mistake"]),
    ("FeedForward", (8, 16), {"activation": "gelu"}, ["activation"]),
    ("Transformer", (), {**MODEL, **WORDS, "activation": "gelu"}, ["activation", "'gelu'"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "activation": "gelu"}, ["activation", "'gelu'"]),
    ("TransformerLM", (), {**MODEL, "vocab": 9, "remat": 3}, ["remat", "int"]),
    ("LowRankAttention", (2, 8), {"length": 6, "rank": None}, ["rank", "NoneType"]),
    ("LowRankAttention", (2, 8), {"length": 6, "rank": 4, "share_projections": "no"},
     ["share_projections", "'no'"]),
    ("MemoryCompressedAttention", (2, 8), {"stride": None}, ["stride", "NoneType"]),
    ("MemoryCompressedAttention", (2, 8), {"convolution": 1}, ["convolution", "1"]),
    ("TransformerDecoderLayer", (2, 8, 16), {"cross_score": 3.5}, ["cross_score", "float"]),
    ("GraphAttention", (8, 4), {"negative_slope": "x"}, ["negative_slope", "str"]),
]  # fmt: skip
INPUTS = [
    ((jnp.ones((5, 7)),), {}, ValueError, ["inputs_q", "8", "[5, 7]"]),
    ((X, jnp.ones((2, 5, 3))), {}, ValueError, ["inputs_k", "8", "[2, 5, 3]"]),
    ((X, X, jnp.ones((2, 5, 3))), {}, ValueError, ["inputs_v", "8", "[2, 5, 3]"]),
    ((X,), {"inputs_v": X}, ValueError, ["inputs_v", "inputs_k"]),
    ((jnp.ones(8),), {}, ValueError, ["inputs_q", "[8]"]),
    ((X, X[:1]), {}, ValueError, ["batch", "*B"]),
    ((X, X, X[:, :3]), {}, ValueError, ["length", "5", "3"]),
    ((X.astype(int),), {}, TypeError, ["inputs_q", "int"]),
    ((X,), {"mask": jnp.ones((5, 5))}, TypeError, ["mask", "bias"]),
    ((X,), {"mask": jnp.ones((5, 5), int)}, TypeError, ["mask", "bias"]),
    ((X,), {"bias": jnp.ones((5, 5), bool)}, TypeError, ["bias", "bool"]),
    ((X,), {"mask": jnp.ones((5, 4), bool)}, ValueError, ["mask", "[5, 4]"]),
    *(
        ((X,), {name: value}, TypeError, [name, "True, False or None"])
        for name in ("deterministic", "is_causal", "decode", "sow_weights")
        for value in ("no", 1, np.ones(2, bool))
    ),
]  # fmt: skip


def refused(call, error, words):
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(("name", "args", "options", "words"), SETTINGS)
def test_wrong_sizes_rates_and_names(flavour, name, args, options, words):
    refused(lambda: flavour.module(name, *args, **options), ValueError, words)


@pytest.mark.parametrize(("name", "args", "options", "words"), KINDS)
def test_wrong_kinds(flavour, name, args, options, words):
    refused(lambda: flavour.module(name, *args, **options), TypeError, words)


@pytest.mark.parametrize(("args", "options", "error", "words"), INPUTS)
def test_wrong_inputs(flavour, args, options, error, words):
    layer = flavour.layer("MultiHeadAttention", 2, 8, inputs=(X,))
    refused(lambda: layer.apply(layer.variables, *args, **options), error, words)


def test_wrong_caches():
    for inputs, cache, words in (
        (X, {}, ["cache", "dict"]),
        (X, [1], ["cache", "list"]),
        (X, "cache", ["cache", "str"]),
        (X.tolist(), KVCache.init((2,), 5, 2, 4), ["inputs", "array", "list"]),
    ):
        refused(lambda x=inputs, y=cache: check_batch("inputs", x, y), TypeError, words)


def test_wrong_tokens_and_masks_of_a_model(flavour):
    ids = jnp.ones((2, 3), int)
    model = flavour.layer("Transformer", **MODEL, **WORDS, inputs=(ids, ids))
    for args, error, words in (
        ((ids.astype(jnp.float32), ids), TypeError, ["source"]),
        ((ids, ids > 0), TypeError, ["target"]),
        ((ids, ids, jnp.ones((2, 4), bool)), ValueError, ["source_mask", "[2, 4]", "[2, 3]"]),
        ((ids, ids, jnp.ones((2, 3))), TypeError, ["bias"]),
    ):
        refused(lambda args=args: model.apply(model.variables, *args), error, words)
    decode = {"method": "decode"}
    call = lambda: model.apply(model.variables, ids, jnp.ones((2, 3, 7)), **decode)  # noqa: E731
    refused(call, ValueError, ["memory", "8", "[2, 3, 7]"])


def test_tokens_and_caches_that_do_not_fit_a_language_model(flavour):
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 9, size=(2, 7)))

    def model(**options):
        short = tokens[:, :6]
        return flavour.layer("TransformerLM", **MODEL, vocab=9, inputs=(short,), **options)

    plain, learned = model(), model(positions="learned", max_length=6)
    dropping = flavour.layer(
        "TransformerLM", **MODEL, vocab=9, dropout_rate=0.5, inputs=(tokens,),
        how={"deterministic": True},
    )  # fmt: skip
    scanned = flavour.module("TransformerLM", **MODEL, vocab=9, scan_layers=True)
    for layer, args, options, error, words in (
        (learned, (tokens,), {}, ValueError, ["7", "6"]),
        (dropping, (tokens,), {}, ValueError, ["deterministic"]),
        (plain, (tokens > 1,), {}, TypeError, ["tokens"]),
        (plain, (tokens, tokens[:, :3] > 1), {}, ValueError, ["token_mask", "[2, 3]"]),
        (
            plain, (tokens, scanned.new_cache(3, 8)), {"method": "with_cache"}, ValueError,
            ["tokens have batch [2]", "cache [3]"],
        ),
    ):  # fmt: skip
        refused(
            lambda layer=layer, args=args, options=options: layer.apply(
                layer.variables, *args, **options
            ),
            error,
            words,
        )
    refused(lambda: learned.module.new_cache(2, 8), ValueError, ["8 tokens", "6"])
    given = (plain.module,) if flavour == "nnx" else (learned.module, learned.variables)
    made = (learned.module,) if flavour == "nnx" else given
    decode = flavour.modules
    for call, words in (
        (lambda: decode.greedy_decode(*made, tokens[:, :5], max_length=4), ["8 tokens", "6"]),
        (lambda: decode.beam_decode(*given, tokens, eos=1, max_length=4, num_beams=0),
         ["num_beams"]),
        (lambda: decode.greedy_decode(*given, tokens, bos=1, max_length=4), ["bos"]),
    ):  # fmt: skip
        refused(call, ValueError, words)


def test_recipes_of_wrong_sizes_are_refused():
    for make, words in (
        (lambda: nnx.additive(0), ["hidden_features", "0"]),
        (lambda: nnx.concat(-1), ["hidden_features", "-1"]),
        (lambda: nnx.cosine(0.0), ["initial_scale", "0.0"]),
    ):
        refused(make, ValueError, words)


def test_functions_for_flax_s_modules_name_a_kernel(flavour):
    refused(
        lambda: flavour.modules.attention_fn(implementation="xla"),
        ValueError,
        ["implementation", "'xla'"],
    )
