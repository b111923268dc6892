"""Decoding with a trained model: greedy decoding, beam search and sampling.

Each is one compiled loop over caches: the source or prompt is encoded once, and each step computes
one token.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from jaxtyping import Float, Int, PRNGKeyArray

from attention_jax._core.axes import Array
from attention_jax.layers import generation
from attention_jax.layers.arguments import AnyMask, Source
from attention_jax.layers.generation import Draw, Task

# The functions check arguments and raise clear errors; numbers may be traced.
AnyKey = Annotated[Any, PRNGKeyArray]
AnyId = Annotated[Any, int | None]
AnyIds = Annotated[Any, int | Sequence[int] | None]
AnyNumber = Annotated[Any, float | int | None]
AnySize = Annotated[Any, int]


class Decoder(NamedTuple):
    """The interface of a model of one flavour to the functions of this file.

    Attributes:
        prompt: Whether the model continues its source.
        source_vocab: Number of source tokens; None if unknown.
        target_vocab: Number of target tokens; None if unknown.
        sentence: `generation.sentence` of the model, compiled.
        beams: `generation.beams` of the model, compiled.
    """

    prompt: bool
    source_vocab: int | None
    target_vocab: int | None
    sentence: Callable[[Task, Draw | None], Array]
    beams: Callable[[Task, int, Array], tuple[Array, Array]]

    def task(self, source: Any, mask: AnyMask, length: Any, **ids: Any) -> Task:
        """The checked arguments of a call."""
        vocabularies = {"source_vocab": self.source_vocab, "target_vocab": self.target_vocab}
        given = {"length": length, "prompt": self.prompt, **vocabularies}
        return generation.task(source, mask, **ids, **given)


def greedy_decode(
    model: Decoder,
    source: Source,
    *,
    bos: AnyId = None,
    eos: AnyIds = None,
    max_length: AnySize,
    source_mask: AnyMask = None,
    pad: AnyId = 0,
) -> Int[Array, "*B L"]:
    """Greedy decoding: takes the most likely token at each step.

        y_t = argmax p(y | bos, y_1, …, y_{t-1}, source)

    One loop, compiled once for each model structure, shape and `max_length`; it stops when every
    sentence has ended. Dropout is disabled.

    Args:
        model: A `Transformer`, or a `TransformerLM` that continues `source`.
        variables: The variables of the model.
        source: Ids `[*B, S]`: a translation's source, or a language model's prompt.
        bos: The id that begins every sentence, or one for each example `[*B]`; it is not part of
            the result. None for a language model, which continues its prompt.
        eos: The id that ends a sentence, or a sequence of alternatives; it is part of the result.
            An empty sequence, or None for a language model, disables it.
        max_length: L, the maximum number of tokens, an int; all other numbers may be traced.
        source_mask: Which source tokens are real: a boolean array `[*B, S]`, or, for a
            `Transformer`, a mask object. A prompt may be padded on either side.
        pad: The id after the end of a sentence; any integer.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        TypeError: If an id is not an integer, or `max_length` is traced.
        ValueError: If `max_length` is not positive, `bos` or `eos` does not suit the model, or
            `bos`, `eos` or an unmasked id of the source is known to be outside the vocabulary.
    """
    task = model.task(source, source_mask, max_length, bos=bos, eos=eos, pad=pad)
    return model.sentence(task, None)


def sample_decode(
    model: Decoder,
    source: Source,
    key: AnyKey,
    *,
    bos: AnyId = None,
    eos: AnyIds = None,
    max_length: AnySize,
    temperature: AnyNumber = 1.0,
    top_k: AnyNumber = None,
    top_p: AnyNumber = None,
    source_mask: AnyMask = None,
    pad: AnyId = 0,
) -> Int[Array, "*B L"]:
    """Sampling: draws each token from the model's probabilities, optionally truncated.

        y_t ~ softmax(logits_t / temperature), among the top k, among the top p of those

    Args:
        key: A PRNG key; equal keys give equal sentences.
        temperature: Positive; above 1 is more varied, below 1 less. A traced value that is not
            positive takes the most likely token.
        top_k: The number of most likely tokens to draw from; None is all. A traced value below 1
            counts as 1.
        top_p: In (0, 1]: keeps the most likely tokens until their probabilities sum to it; None is
            all. A traced value that is not positive keeps the most likely token.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        TypeError: If `key` is not a key, an option is not a number, or as in `greedy_decode`.
        ValueError: If an option is known and out of range, or as in `greedy_decode`.

    References:
        Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation", arXiv:1805.04833, §5.4.
        Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751,
        eq. 2-3.
    """
    draw = generation.draw(key, temperature, top_k, top_p)
    task = model.task(source, source_mask, max_length, bos=bos, eos=eos, pad=pad)
    return model.sentence(task, draw)


def beam_decode(
    model: Decoder,
    source: Source,
    *,
    bos: AnyId = None,
    eos: AnyIds,
    max_length: AnySize,
    num_beams: AnySize,
    length_penalty: AnyNumber = 0.6,
    source_mask: AnyMask = None,
    pad: AnyId = 0,
) -> tuple[Int[Array, "*B M L"], Float[Array, "*B M"]]:
    """Beam search: the most likely sentences found.

        score(y) = log p(y | source) / ((5 + |y|) / 6)^length_penalty

    The search stops when no live beam can exceed the lowest score of `num_beams` ended sentences.

    Args:
        num_beams: M, the number of beams, an int.
        length_penalty: 0 ranks by log-probability; larger values favour longer sentences. A traced
            value that is negative gives NaN scores.

    Returns:
        Ids `[*B, num_beams, max_length]`, the best first, and their scores `[*B, num_beams]`.

    Raises:
        TypeError: If an option is not a number, `num_beams` is traced, or as in `greedy_decode`.
        ValueError: If an option is known and out of range, or as in `greedy_decode`.

    References:
        Wu et al. 2016, "Google's Neural Machine Translation System", arXiv:1609.08144, eq. 14.
    """
    penalty = generation.check_beams(num_beams, length_penalty)
    task = model.task(source, source_mask, max_length, bos=bos, eos=eos, pad=pad)
    return model.beams(task, num_beams, penalty)
