"""Whole models in Linen: decoded over caches, and equal to their twins in NNX."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import attention_jax as aj
from attention_jax import linen
from attention_jax import nnx as modules
from attention_jax.linen import decode
from tests.modules.linen_calls import apply

pytestmark = pytest.mark.thorough

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 9, size=(2, 7)))
REAL = jnp.asarray([[True] * 7, [False, False] + [True] * 5])
SOURCE = jnp.array([[3, 4, 5, 6], [3, 4, 0, 0]])
KEY = jax.random.key(0)


def language(**options):
    """A language model of both flavours, with strong preferences, and the variables."""
    sizes = (2 if options.get("scan_layers") else 1, 2, 8, 16, 9)
    options = {"tie_output": False, **options}
    twin = nnx.jit(lambda: modules.TransformerLM(*sizes, rngs=nnx.Rngs(0), **options))()
    twin.output.kernel[...] *= 3.0
    return linen.TransformerLM(*sizes, **options), linen.from_nnx(twin), twin


def translation(**options):
    sizes = (1, 2, 8, 16, 11, 7)
    options = {"tie_output": False, "mask": aj.masks.window(2, None), **options}
    twin = nnx.jit(lambda: modules.Transformer(*sizes, rngs=nnx.Rngs(4), **options))()
    twin.output.kernel[...] *= 5.0
    return linen.Transformer(*sizes, **options), linen.from_nnx(twin), twin


def close(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned", "max_length": 12},
        {"positions": "rotary", "scan_layers": True, "num_kv_heads": 1, "normalize_qk": True},
    ],
    ids=lambda options: options["positions"],
)
def test_a_language_model_is_its_twin_full_in_steps_and_in_sentences(options):
    model, variables, twin = language(**options)
    shapes = jax.eval_shape(model.init, KEY, TOKENS)
    chex.assert_trees_all_equal_shapes(variables, shapes)
    moved = jax.tree.map(lambda x: x + 1, variables)
    chex.assert_trees_all_equal(linen.from_nnx(linen.to_nnx(moved, twin)), moved)
    full = apply(model, variables, TOKENS, REAL)
    close(full, nnx.jit(lambda twin: twin(TOKENS, REAL))(twin))

    step = jax.jit(
        lambda tokens, cache, **o: model.apply(variables, tokens, cache, method="with_cache", **o),
        donate_argnums=1,
    )
    cache = model.new_cache(2, 9)
    given = jax.tree.leaves(cache)
    rows, cache = step(TOKENS[:, :4], cache, valid=REAL[:, :4])
    assert all(leaf.is_deleted() for leaf in given)
    outs = [rows]
    for t in range(4, 7):
        row, cache = step(TOKENS[:, t : t + 1], cache)
        outs.append(row)
    close(np.asarray(jnp.concatenate(outs, 1))[REAL], np.asarray(full)[REAL])

    call = {"max_length": 5, "source_mask": REAL}
    if "scan_layers" not in options:
        made = linen.greedy_decode(model, variables, TOKENS, **call)
        alone = linen.greedy_decode(model, variables, TOKENS[1, 2:], max_length=5)
        np.testing.assert_array_equal(made[1], alone)
        sentence = jnp.concatenate([TOKENS, made], 1)[:1]
        best = jnp.argmax(apply(model, variables, sentence[:, :-1]), -1)
        np.testing.assert_array_equal(best[:, 6:], made[:1])
        return
    draw = {**call, "temperature": 0.9, "top_k": 4, "top_p": 0.9}
    drawn = linen.sample_decode(model, variables, TOKENS, KEY, **draw)
    np.testing.assert_array_equal(drawn, modules.sample_decode(twin, TOKENS, KEY, **draw))
    search = {**call, "eos": 3, "num_beams": 3}
    ids, scores = linen.beam_decode(model, variables, TOKENS, **search)
    expected, points = modules.beam_decode(twin, TOKENS, **search)
    np.testing.assert_array_equal(ids, expected)
    close(scores, points)


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_window_needs_a_cache_of_its_own_length_alone(flavour):
    model, variables, twin = language(positions="rotary", mask=aj.masks.window(2, 0))

    @jax.jit
    def run(variables, twin):
        full = model.apply(variables, TOKENS)
        maker = model if flavour == "linen" else twin
        cache, made = maker.new_cache(2, 3, rolling=True), []
        for start, end in ((0, 4), (4, 5), (5, 7)):
            chunk = TOKENS[:, start:end]
            if flavour == "linen":
                row, cache = model.apply(variables, chunk, cache, method="with_cache")
            else:
                row, cache = twin.with_cache(chunk, cache)
            made.append(row)
        return jnp.concatenate(made, 1), full

    close(*run(variables, twin))


@pytest.mark.parametrize(
    "options",
    [{"cross_attention": "mean", "norm": "pre"}, {"cross_score": "additive", "scan_layers": True}],
    ids=str,
)
def test_a_translation_model_is_its_twin(options):
    """Case A23: a beam's state is that of its own tokens, or its score would be another's."""
    model, variables, twin = translation(**options)
    call = {"bos": 1, "eos": 2, "max_length": 5, "source_mask": SOURCE > 0}
    made = linen.greedy_decode(model, variables, SOURCE, **call)
    before = jnp.concatenate([jnp.ones((2, 1), int), made[:, :-1]], 1)
    best = jnp.argmax(apply(model, variables, SOURCE, before, SOURCE > 0), -1)
    ended = jnp.cumsum(before[:, 1:] == 2, axis=1) > 0
    np.testing.assert_array_equal(jnp.where(ended, 0, best[:, 1:]), made[:, 1:])
    if "scan_layers" in options:
        return
    padded, target = jnp.roll(SOURCE[1:], 2, axis=1), before[1:]  # on the left
    model_rows = apply(model, variables, padded, target, padded > 0)
    close(model_rows, apply(model, variables, SOURCE[1:, :2], target))
    shifted = {"source_positions": jnp.arange(4) - 2, "target_positions": jnp.arange(5)}
    mask = aj.masks.from_array(padded[:, None, None] > 0)
    close(apply(model, variables, padded, target, mask, **shifted), model_rows)
    memory = apply(model, variables, SOURCE, SOURCE > 0, method="encode")
    new = jax.jit(lambda v, memory: model.apply(v, memory, 5, method="new_cache"))
    cache = new(variables, memory)
    rows, _ = apply(model, variables, before[:, :2], cache, SOURCE > 0, method="with_cache")
    close(rows, apply(model, variables, SOURCE, before, SOURCE > 0)[:, :2])
    search = {**call, "num_beams": 3}
    ids, scores = linen.beam_decode(model, variables, SOURCE, **search)
    expected, points = modules.beam_decode(twin, SOURCE, **search)
    np.testing.assert_array_equal(ids, expected)
    close(scores, points)


def test_it_compiles_once(monkeypatch):
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(decode._sentence.__wrapped__, n=1)
    monkeypatch.setattr(decode, "_sentence", jax.jit(counted, static_argnums=0))
    for scale, shift, window in ((1.0, 0, 3), (2.0, 1, 3)):
        # Made anew each time, with a mask of its own: equal models are one.
        mask = aj.masks.window(window, None) & aj.masks.from_array(np.ones((1, 1), bool))
        model = linen.TransformerLM(1, 2, 8, 16, 9, mask=mask)
        variables = jax.tree.map(
            lambda leaf, scale=scale: jnp.full(leaf.shape, scale, leaf.dtype),
            jax.eval_shape(model.init, KEY, TOKENS),
        )
        linen.greedy_decode(model, variables, TOKENS - shift, eos=shift, max_length=3)


def test_where_tokens_stand():
    """Two sentences in one row, each with positions of its own, are as if alone."""
    ids = np.array([0, 0, 0, 1, 1, 1])
    packed, at = aj.masks.segments(ids[None]), jnp.array([0, 1, 2, 0, 1, 2])
    target, memory = TOKENS[:1, :6] % 7, jax.random.normal(KEY, (1, 4, 8))
    seen = aj.masks.window(1, 1)  # of the memory, by position
    model, variables, twin = translation(positions="learned", max_length=6)

    inputs, told = (target, memory, packed, seen), {"query_positions": at}
    found = apply(model, variables, *inputs, method="decode", **told)
    close(found, nnx.jit(lambda twin: twin.decode(*inputs, **told))(twin))
    alone = apply(model, variables, target[:, 3:], memory, None, seen, method="decode")
    close(found[:, 3:], alone)
    # In a decoding step the collection "cache" knows.
    layer = linen.TransformerDecoderLayer(2, 8, 16, decode=True)
    x = jax.random.normal(KEY, (1, 4, 8))
    variables = jax.jit(layer.init)(KEY, x, memory)
    full = layer.clone(decode=False)
    params = {"params": variables["params"]}
    expected = apply(full, params, x, memory, memory_mask=seen)
    step = jax.jit(lambda v, x: layer.apply(v, x, memory, memory_mask=seen, mutable=["cache"]))
    for t in range(4):
        out, cache = step(variables, x[:, t : t + 1])
        variables = {**variables, **cache}
        close(out[:, 0], expected[:, t])
    shifted = apply(full, params, x, memory, memory_mask=seen, query_positions=jnp.arange(4) + 1)
    assert not np.allclose(shifted, expected, atol=1e-3)


@pytest.mark.parametrize("remat", [True, "dots_saveable"])
def test_float16_computes_and_float32_learns(flavour, remat):
    """With Flax's dynamic scale of the loss, in layers that are scanned and recomputed."""
    options = {"scan_layers": True, "remat": remat, "positions": "rotary", "dtype": jnp.float16}
    model = flavour.layer("TransformerLM", 2, 2, 8, 16, 9, inputs=(TOKENS,), **options)

    def loss(params):
        logits = model.replace(params)(TOKENS)
        assert logits.dtype == jnp.float16
        logits = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, TOKENS[..., None], -1))

    run = jax.jit(lambda scale, params: scale.value_and_grad(loss)(params))
    _, finite, value, gradients = run(DynamicScale(scale=256.0), model.params)
    assert bool(finite)
    assert abs(float(value) - np.log(9)) < 1.5
    for leaf in jax.tree.leaves(gradients):
        assert leaf.dtype == jnp.float32
        assert bool(jnp.isfinite(leaf).all())
