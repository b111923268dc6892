"""The decoder-only Transformer: over caches, scanned, recomputed, in low precision."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.nnx import Transformer, TransformerEncoder, TransformerLM, greedy_decode

pytestmark = pytest.mark.thorough

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 9, size=(2, 7)))
STACKS = {
    "plain": {},
    "scan": {"scan_layers": True},
    "remat": {"remat": "dots_saveable"},
    "both": {"scan_layers": True, "remat": True},
}


def _model(**options):
    return TransformerLM(2, 2, 8, 16, 9, **options, rngs=nnx.Rngs(0))


def _decoded(model, tokens, cache, valid=None):
    first, cache = model.with_cache(tokens[:, :4], cache, valid=valid)

    def step(cache, token):
        logits, cache = model.with_cache(token[:, None], cache)
        return cache, logits[:, 0]

    _, rest = jax.lax.scan(step, cache, tokens[:, 4:].T)
    return jnp.concatenate([first, jnp.swapaxes(rest, 0, 1)], 1)


@nnx.jit
def _both(model, tokens, real, cache):
    """The full pass over padded tokens, and decoding."""
    return model(tokens, real), _decoded(model, tokens, cache, real[:, :4])


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "learned", "max_length": 9},
        {"positions": "sinusoidal", "scan_layers": True, "norm": "post"},
        {"positions": "rotary", "mask": aj.masks.window(2, None), "num_kv_heads": 1},
    ],
    ids=lambda options: options["positions"],
)
def test_step_t_is_row_t_of_the_full_pass_of_a_padded_prompt(options):
    model = _model(**options)
    real = jnp.asarray([[True] * 7, [False, False] + [True] * 5])
    full, decoded = _both(model, TOKENS, real, model.new_cache(2, 9))
    np.testing.assert_allclose(
        np.asarray(decoded)[real], np.asarray(full)[real], rtol=1e-4, atol=1e-5
    )
    if options["positions"] == "learned":
        alone = nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS[1:, 2:])
        np.testing.assert_allclose(full[1, 2:], alone[0], rtol=1e-4, atol=1e-5)


@nnx.jit
def _trained(model, tokens):
    """Two steps, as the second drops other entries; and the gradients of the first."""

    def loss(model):
        return jnp.sum(jnp.sin(model(tokens, deterministic=False)))

    value, gradients = nnx.value_and_grad(loss)(model)
    return jnp.stack([value, loss(model)]), gradients


def test_scan_and_remat_change_nothing_in_training():
    """Values, gradients, and what the layers' own streams drop."""
    results = {}
    for name in ("plain", "both"):
        model = _model(dropout_rate=0.2, attention_dropout_rate=0.2, **STACKS[name])
        values, gradients = _trained(model, TOKENS)
        pure = nnx.to_pure_dict(gradients)
        layers = pure["decoder"]["layers"]
        if not model.decoder.scan_layers:
            layers = jax.tree.map(lambda *x: jnp.stack(x), *(layers[i] for i in range(2)))
        results[name] = (values, layers, pure["embedding"])
    expected = results.pop("plain")
    assert float(expected[0][0]) != float(expected[0][1])
    for name, found in results.items():
        chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-4, custom_message=name)


def test_a_stream_given_in_the_call_goes_through_all_layers():
    run = nnx.jit(lambda model, rngs: model(TOKENS, deterministic=False, rngs=rngs))
    outs, counts = [], []
    for name in ("plain", "both"):
        rngs = nnx.Rngs(dropout=7)
        outs.append(run(_model(dropout_rate=0.2, **STACKS[name]), rngs))
        counts.append(int(rngs.dropout.count[...]))
    np.testing.assert_allclose(outs[1], outs[0], rtol=1e-4, atol=1e-5)
    assert counts == [5, 5], "one for the embedding, two for each layer"


def test_a_scanned_layer_is_compiled_once():
    def size(layers):
        stack = TransformerEncoder(layers, 2, 8, 16, scan_layers=True, rngs=nnx.Rngs(0))
        graph, state = nnx.split(stack)
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        return len(run.lower(state, jnp.ones((1, 3, 8))).as_text())

    assert size(4) < 1.05 * size(2)


def test_a_recomputed_layer_keeps_its_input_alone():
    """What the backward pass is handed: little with remat, everything without."""

    def kept(**options):
        stack = TransformerEncoder(2, 2, 8, 16, **options, rngs=nnx.Rngs(0))
        x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32, 8)), jnp.float32)
        out, pull = jax.vjp(jax.jit(lambda x: stack(x)), x)
        size = sum(leaf.size for leaf in jax.tree.leaves(pull) if leaf.shape[-2:-1] == (32,))
        return size, out, pull(out)[0]

    (few, *found), (many, *expected) = kept(remat=True), kept()
    assert few < 0.3 * many
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_scanned_encoder_decoder():
    """Encoding, weights, statistics and decoding are those of the layers written out."""
    plain, scanned = (
        Transformer(2, 2, 8, 16, 11, 7, rngs=nnx.Rngs(0), **options)
        for options in ({}, STACKS["both"])
    )
    source, target = TOKENS, TOKENS[:, :4] % 7
    run = nnx.jit(
        lambda model, target: (
            model(source, target, source > 2),
            model.cross_attention_weights(source, target, source > 2),
        )
    )
    found = run(scanned, target)
    chex.assert_trees_all_close(found, run(plain, target), rtol=1e-4, atol=1e-5)
    call = {"bos": 1, "eos": (), "max_length": 4, "source_mask": source > 2}
    made = greedy_decode(scanned, source, **call)
    before = jnp.concatenate([jnp.ones((2, 1), int), made[:, :-1]], 1)
    np.testing.assert_array_equal(made, np.argmax(run(scanned, before)[0], -1))


def test_a_cache_of_another_batch_is_refused_by_a_stack():
    with pytest.raises(ValueError, match=r"x has batch \[1\] but the cache \[2\]"):
        _model().decoder.with_cache(jnp.ones((1, 2, 8)), _model().new_cache(2, 8))
