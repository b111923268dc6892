"""Greedy decoding: each token is the likeliest after a full pass over the tokens before it."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.nnx import Transformer, additive, decode, greedy_decode

BOS, EOS = 1, 2
SOURCE = jnp.array([[3, 4, 5, 6], [3, 4, 0, 0], [7, 8, 9, 0]])


def _model(seed=0, **options):
    """A model with strong, varied preferences."""
    model = Transformer(1, 2, 8, 16, 11, 7, tie_output=False, rngs=nnx.Rngs(seed), **options)
    model.output.kernel[...] *= 5.0
    return model


def _by_hand(model, source, mask, length, pad=0, eos=EOS):
    run = nnx.jit(
        lambda model, source, tokens, mask: model(source, tokens, mask, deterministic=True)
    )
    tokens = np.full((len(source), length + 1), BOS)
    done = np.zeros(len(source), bool)
    for step in range(length):
        logits = run(model, source, jnp.asarray(tokens), mask)[:, step]
        best = np.where(done, pad, np.argmax(logits, -1))
        tokens[:, step + 1] = best
        done |= best == eos
    return tokens[:, 1:]


@pytest.mark.parametrize(
    "options",
    [
        {"cross_score": "additive"},
        {"cross_attention": "mean", "norm": "pre"},
        {"dropout_rate": 0.5},
    ],
    ids=str,
)
def test_step_t_equals_row_t_of_the_full_pass(options):
    model = _model(**options)
    tokens = greedy_decode(model, SOURCE, bos=BOS, eos=EOS, max_length=9, source_mask=SOURCE > 0)
    expected = _by_hand(model, SOURCE, SOURCE > 0, 9)
    np.testing.assert_array_equal(tokens, expected)
    assert tokens.dtype == jnp.int32
    assert len(np.unique(expected)) > 1, "a model that says one thing shows nothing"


def test_the_mask_matters_and_padding_does_not():
    model = _model(2)
    call = {"bos": BOS, "eos": EOS, "max_length": 9}
    padded = greedy_decode(model, SOURCE, source_mask=SOURCE > 0, **call)
    alone = greedy_decode(model, SOURCE[1, :2], **call)
    np.testing.assert_array_equal(padded[1], alone)
    assert not np.array_equal(padded, greedy_decode(model, SOURCE, **call))


def _ends_after(count):
    """A model that says 3 `count` times and ends, two tokens later if the source begins high."""

    class Counts(Transformer):
        def __init__(self):
            self.features = 1

        def encode(self, source, source_mask=None, *, deterministic=None, rngs=None):
            return source[..., None].astype(jnp.float32)

        def decode_states(self, target, memory, target_mask, memory_mask, *, deterministic):
            places = jnp.arange(target.shape[-1], dtype=jnp.float32)[:, None]
            late = jnp.where(memory[..., :1, :] > 5, 2.0, 0.0)
            return jnp.broadcast_to(places[None], (*target.shape, 1)) - late

        def logits(self, states):
            end = (states >= count).astype(jnp.float32)
            return jnp.concatenate([end * 0, end * 0, end, 0.5 + end * 0], -1)

    return Counts()


@pytest.mark.parametrize("count", [0, 2, 5])
def test_after_the_end_stands_padding(count):
    model = _ends_after(count)
    tokens = greedy_decode(model, SOURCE, bos=BOS, eos=EOS, max_length=5, pad=6)
    early, late = ([3] * n + [EOS] + [6] * 5 for n in (count, count + 2))
    np.testing.assert_array_equal(tokens, [early[:5], early[:5], late[:5]])


def test_it_stops_as_soon_as_all_have_ended(monkeypatch):
    model = _ends_after(2)
    bodies = []
    loop = decode.jax.lax.while_loop

    def counting(go_on, body, start):
        carry = start
        while bool(go_on(carry)):
            bodies.append(1)
            carry = body(carry)
        return carry

    monkeypatch.setattr(decode.jax.lax, "while_loop", counting)
    with decode.jax.disable_jit():
        greedy_decode(model, SOURCE, bos=BOS, eos=EOS, max_length=50)
    assert len(bodies) == 5, "2 tokens and 2 more in the slowest sentence, and its end"
    assert loop is not counting


def test_it_compiles_once():
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(decode._loop.__wrapped__, n=1)
    jitted = decode.jax.jit(counted, static_argnums=(0, 5))
    original, decode._loop = decode._loop, jitted
    try:
        for seed, bos, eos in ((0, 1, 2), (1, 1, 2), (1, 3, 4)):
            model = _model(seed, cross_score=additive(5))
            greedy_decode(model, SOURCE + 0, bos=bos, eos=eos, max_length=4)
    finally:
        decode._loop = original


def test_one_sentence_without_a_batch_axis_and_many_axes():
    model = _model()
    call = {"bos": BOS, "eos": EOS, "max_length": 5}
    batch = greedy_decode(model, SOURCE, **call)
    np.testing.assert_array_equal(greedy_decode(model, SOURCE[0], **call), batch[0])
    np.testing.assert_array_equal(greedy_decode(model, SOURCE[None], **call), batch[None])
    np.testing.assert_array_equal(greedy_decode(model, np.asarray(SOURCE), **call), batch)


def test_bad_input():
    with pytest.raises(ValueError, match="max_length"):
        greedy_decode(_model(), SOURCE, bos=BOS, eos=EOS, max_length=0)
    with pytest.raises(TypeError, match="source"):
        greedy_decode(_model(), SOURCE > 0, bos=BOS, eos=EOS, max_length=3)
    with pytest.raises(ValueError, match="source_mask"):
        greedy_decode(_model(), SOURCE, bos=BOS, eos=EOS, max_length=3, source_mask=SOURCE[0] > 0)
