"""Decoding: every token is the one that a full pass over the tokens before it gives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.layers import generation, sampling
from attention_jax.nnx import (
    Transformer,
    TransformerLM,
    additive,
    beam_decode,
    decode,
    greedy_decode,
    sample_decode,
)

pytestmark = pytest.mark.thorough

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

        def new_cache(self, memory, length):
            return jnp.zeros((), jnp.int32), memory

        def with_cache(self, target, cache, memory_mask=None, *, deterministic):
            step, memory = cache
            late = jnp.where(memory[..., :1, :] > 5, 2.0, 0.0)
            states = jnp.broadcast_to(step.astype(jnp.float32), (*target.shape, 1)) - late
            return self.logits(states), (step + 1, memory)

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
    loop = sampling.jax.lax.while_loop

    def counting(go_on, body, start):
        carry = start
        while bool(go_on(carry)):
            bodies.append(1)
            carry = body(carry)
        return carry

    monkeypatch.setattr(sampling.jax.lax, "while_loop", counting)
    with jax.disable_jit():
        greedy_decode(model, SOURCE, bos=BOS, eos=EOS, max_length=50)
    assert len(bodies) == 5, "2 tokens and 2 more in the slowest sentence, and its end"
    assert loop is not counting


def test_it_compiles_once(monkeypatch):
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(decode._sentence.__wrapped__, n=1)
    monkeypatch.setattr(decode, "_sentence", jax.jit(counted, static_argnums=0))
    for seed, bos, eos in ((0, 1, 2), (1, 1, 2), (1, 3, 4)):
        model = _model(seed, cross_score=additive(5))
        greedy_decode(model, SOURCE + 0, bos=bos, eos=eos, max_length=4)


def test_one_sentence_without_a_batch_axis_and_many_axes():
    model = _model()
    call = {"bos": BOS, "eos": EOS, "max_length": 5}
    batch = greedy_decode(model, SOURCE, **call)
    np.testing.assert_array_equal(greedy_decode(model, SOURCE[0], **call), batch[0])
    np.testing.assert_array_equal(greedy_decode(model, SOURCE[None], **call), batch[None])
    np.testing.assert_array_equal(greedy_decode(model, np.asarray(SOURCE), **call), batch)


def _language(**options):
    """A language model of 5 tokens with strong, varied preferences."""
    model = TransformerLM(1, 2, 8, 16, 5, tie_output=False, rngs=nnx.Rngs(3), **options)
    model.output.kernel[...] *= 3.0
    return model


@nnx.jit
def _run(model, *inputs):
    return model(*inputs)


def _log_probability(model, prompt, made):
    """log p of `made` [many, L] after `prompt`, by full passes: of each token, `[many, L]`."""
    tokens = np.concatenate([np.tile(prompt, (len(made), 1)), made], 1)
    logits = np.asarray(_run(model, tokens[:, :-1]), np.float64)[:, len(prompt) - 1 :]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logits, made[..., None], -1)[..., 0]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_of_all_sentences(alpha):
    """With as many beams as there are beginnings nothing is lost: every sentence is compared."""
    model, length, eos = _language(positions="rotary"), 3, 2
    prompts = np.array([[1, 3, 4, 0], [0, 4, 4, 1]])
    tokens, scores = beam_decode(
        model, prompts, eos=eos, max_length=length, num_beams=25, length_penalty=alpha, pad=eos
    )
    compiled = decode._beams._cache_size()
    other = {"eos": 3, "max_length": length, "num_beams": 25, "length_penalty": alpha + 0.5}
    beam_decode(_language(positions="rotary"), prompts + 0, **other)
    assert decode._beams._cache_size() == compiled, "another end, penalty and model of one kind"
    every = np.stack(np.meshgrid(*[np.arange(5)] * length, indexing="ij"), -1).reshape(-1, length)
    for prompt, found, score in zip(prompts, tokens, scores, strict=True):
        log_p = _log_probability(model, prompt, every)
        ends = np.argmax(every == eos, 1)
        count = np.where((every == eos).any(1), ends + 1, length)
        total = (log_p * (np.arange(length) < count[:, None])).sum(1)
        rank = total / ((5 + count) / 6) ** alpha
        # Sentences that differ behind their end are one.
        padded = np.where(np.arange(length) < count[:, None], every, eos)
        best = np.unique(padded[np.argsort(-rank)[:1]], axis=0)[0]
        np.testing.assert_array_equal(found[0], best)
        np.testing.assert_allclose(score[0], rank.max(), rtol=1e-4)
        assert np.all(np.diff(score) <= 0)


def test_the_scores_of_beams_are_those_of_full_passes():
    """Case A23: a beam's state is that of its own tokens, or its probability would be another's."""
    model, source = _model(4), np.asarray(SOURCE)
    length, alpha = 5, 0.6
    tokens, scores = beam_decode(
        model, source, bos=BOS, eos=EOS, max_length=length, num_beams=3, source_mask=source > 0
    )
    inputs = np.concatenate([np.full((3, 3, 1), BOS), tokens[..., :-1]], -1).reshape(9, length)
    repeated = np.repeat(source, 3, 0)
    logits = np.asarray(_run(model, repeated, inputs, repeated > 0), np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    of_tokens = np.asarray(tokens).reshape(9, length)
    log_p = np.take_along_axis(logits, of_tokens[..., None], -1)[..., 0]
    ended = (of_tokens == EOS).any(1)
    count = np.where(ended, np.argmax(of_tokens == EOS, 1) + 1, length)
    total = (log_p * (np.arange(length) < count[:, None])).sum(1)
    np.testing.assert_allclose(
        np.asarray(scores).ravel(), total / ((5 + count) / 6) ** alpha, rtol=1e-3, atol=1e-4
    )
    assert len(np.unique(of_tokens, axis=0)) > 3, "beams that are alike show nothing"


def test_a_prompt_may_be_padded_on_either_side():
    model = _language(positions="alibi")
    call = {"max_length": 6}
    alone = greedy_decode(model, np.array([[1, 3, 4]]), **call)
    for prompt in ([0, 0, 1, 3, 4], [1, 3, 4, 0, 0], [1, 0, 3, 0, 4]):
        prompt = np.array([prompt, [4, 1, 2, 3, 1]])
        real = prompt > 0
        found = greedy_decode(model, prompt, source_mask=real, **call)
        np.testing.assert_array_equal(found[0], alone[0])
    sentence = np.concatenate([[4, 1, 2, 3, 1], found[1]])
    best = np.argmax(_run(model, sentence), -1)
    np.testing.assert_array_equal(best[4:-1], found[1])


def test_sampling_draws_from_what_is_left():
    """Frequencies are the probabilities of the shortlist, to four standard deviations."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))
    for options, kept in (
        ((1.0, None, None), 5),
        ((1.0, 2, None), 2),
        ((1.0, None, 0.69), 2),
        ((1.0, None, 0.71), 3),
        ((1.0, 4, 0.01), 1),
        ((1.0, 9, 1.0), 5),
    ):
        left = sampling.shortlist(logits, *options)
        assert int(jnp.sum(left > -jnp.inf)) == kept, options
    hot = sampling.shortlist(logits, 2.0, None, None)
    np.testing.assert_allclose(hot, logits / 2, rtol=1e-6)
    model, prompt = _language(), np.tile([[1, 3]], (500, 1))
    call = {"max_length": 1, "top_k": 3, "temperature": 0.7}
    drawn = sample_decode(model, prompt, jax.random.key(0), **call)
    np.testing.assert_array_equal(drawn, sample_decode(model, prompt, jax.random.key(0), **call))
    left = sampling.shortlist(_run(model, prompt[:1])[0, -1], 0.7, 3, None)
    p = np.asarray(jax.nn.softmax(left))
    share = np.bincount(np.asarray(drawn)[:, 0], minlength=5) / 500
    assert np.all(np.abs(share - p) <= 4 * np.sqrt(p * (1 - p) / 500)), (share, p)
    again = sample_decode(model, prompt, jax.random.key(1), **call)
    assert not np.array_equal(drawn, again)


def test_bad_input():
    with pytest.raises(ValueError, match="max_length"):
        greedy_decode(_model(), SOURCE, bos=BOS, eos=EOS, max_length=0)
    with pytest.raises(TypeError, match="source"):
        greedy_decode(_model(), SOURCE > 0, bos=BOS, eos=EOS, max_length=3)
    with pytest.raises(ValueError, match="source_mask"):
        greedy_decode(_model(), SOURCE, bos=BOS, eos=EOS, max_length=3, source_mask=SOURCE[0] > 0)
    model, ids, key = _language(), np.ones((2, 3), int), jax.random.key(0)
    for call, words in (
        (lambda: greedy_decode(model, ids, bos=1, max_length=2), "bos"),
        (lambda: greedy_decode(_model(), ids, bos=1, max_length=2), "eos"),
        (lambda: greedy_decode(model, ids[:, :0], max_length=2), "at least one token"),
        (lambda: greedy_decode(model, ids, source_mask=ids[:1] > 0, max_length=2), "source_mask"),
        (lambda: beam_decode(model, ids, eos=2, max_length=2, num_beams=0), "num_beams"),
        (
            lambda: beam_decode(model, ids, eos=2, max_length=2, num_beams=2, length_penalty=-1),
            "length_penalty",
        ),
        (lambda: sample_decode(model, ids, key, max_length=2, temperature=0), "temperature"),
        (lambda: sample_decode(model, ids, key, max_length=2, top_p=0.0), "top_p"),
        (lambda: sample_decode(model, ids, key, max_length=2, top_k=0), "top_k"),
        (lambda: greedy_decode(model, ids * 99, max_length=2), "source holds id 99, .* has VOCAB"),
        (lambda: greedy_decode(model, -ids, max_length=2), "source holds id -1"),
        (lambda: greedy_decode(_model(), SOURCE, bos=99, eos=2, max_length=2), "bos is 99"),
        (lambda: sample_decode(model, ids, jax.random.split(key), max_length=2), "key"),
    ):
        with pytest.raises(ValueError, match=words.replace("VOCAB", str(model.vocab))):
            call()
    with pytest.raises(TypeError, match="key must be one PRNG key"):
        sample_decode(model, ids, 0, max_length=2)


def test_ids_that_nobody_sees_may_be_any():
    strange = SOURCE.at[:, -1].set(99)

    def asked(mask, ids=strange):
        options = {"bos": BOS, "eos": EOS, "pad": 0, "length": 2, "prompt": False}
        return generation.task(ids, mask, **options, source_vocab=50, target_vocab=50)

    real = strange < 50
    asked(real)
    generation.task(
        SOURCE, None, bos=BOS, eos=49, pad=-1, length=2, prompt=False, source_vocab=50,
        target_vocab=50,
    )  # fmt: skip
    asked(aj.masks.padding(jnp.array([SOURCE.shape[-1] - 1] * SOURCE.shape[0])))
    for mask in (None, ~real, aj.masks.causal(align="end")):
        with pytest.raises(ValueError, match="id 99, but the vocabulary has 50"):
            asked(mask)
    jax.eval_shape(lambda ids: asked(None, ids).source, SOURCE)  # a traced id is known to nobody
