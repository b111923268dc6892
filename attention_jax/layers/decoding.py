"""From a trained model to sentences: greedy, by beam search, or drawn at random.

Every way is one compiled loop over caches: the source is encoded once, a prompt read once, and each
step computes one token.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from jaxtyping import Float, Int, PRNGKeyArray

from attention_jax._core.axes import Array
from attention_jax.layers import generation
from attention_jax.layers.arguments import AnyMask, Source
from attention_jax.layers.generation import Draw, Task

# What does not fit gets an error of ours; numbers may be traced.
AnyKey = Annotated[Any, PRNGKeyArray]
AnyId = Annotated[Any, int | None]
AnyIds = Annotated[Any, int | Sequence[int] | None]
AnyNumber = Annotated[Any, float | int | None]
AnySize = Annotated[Any, int]


class Decoder(NamedTuple):
    """A model of one flavour, as the functions of this file use it.

    Attributes:
        prompt: Whether the model continues its source.
        source_vocab: Number of source tokens; None is unknown.
        target_vocab: Number of target tokens; None is unknown.
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
    """The sentence that takes the likeliest token at each step.

        y_t = argmax p(y | bos, y_1, …, y_{t-1}, source)

    One compiled loop, compiled once for each model structure, shape and `max_length`; it ends as
    soon as every sentence has its end. Dropout is left out.

    Args:
        model: A `Transformer`, or a `TransformerLM` that continues `source`.
        variables: The variables of the model.
        source: Ids `[*B, S]`: a translation's source, or a language model's prompt.
        bos: The id that begins every sentence, or one for each example `[*B]`; it is not part of
            the result. None for a language model, which continues its prompt.
        eos: The id that ends a sentence, or a sequence of ids any of which does; it is part of the
            result. An empty sequence, or None for a language model, is no such id.
        max_length: L, the most tokens to make, an int: all other numbers may be traced.
        source_mask: Which source tokens are real: a boolean array `[*B, S]`, or, for a
            `Transformer`, a mask object. A prompt may be padded on either side.
        pad: What follows the end of a sentence; any integer.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        TypeError: If an id is not an integer, or `max_length` is traced.
        ValueError: If `max_length` is not positive, `bos` or `eos` does not suit the model, or
            `bos`, `eos` or an id of the source is known and lies outside the vocabulary; what
            `source_mask` hides may.
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
    """Sentences drawn token by token from the model's own probabilities, or a part of them.

        y_t ~ softmax(logits_t / temperature), among the top k, among the top p of those

    Args:
        key: A PRNG key; equal keys give equal sentences.
        temperature: Positive; above 1 is more varied, below 1 less. A traced one that is not
            positive takes the likeliest token.
        top_k: How many of the likeliest tokens may be drawn; None is all. A traced one below 1 is
            1.
        top_p: In (0, 1]: the likeliest tokens are kept until their probabilities sum to it; None is
            all. A traced one that is not positive keeps the likeliest token.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        TypeError: If `key` is none, an option is not a number, or as in `greedy_decode`.
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
    """The likeliest sentences that a beam search finds.

        score(y) = log p(y | source) / ((5 + |y|) / 6)^length_penalty

    The search ends once no live beam can overtake the worst of the `num_beams` that have ended.

    Args:
        num_beams: M, the number of beams, an int.
        length_penalty: 0 leaves log-probabilities alone; larger values favour longer sentences. The
            scores of a traced one that is negative are NaN.

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
