"""From a trained model to sentences: greedy, by beam search, or drawn at random.

Every way is one compiled loop over caches: the source is encoded once, a prompt read once, and each
step computes one token.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, PRNGKeyArray

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules import beam
from attention_jax._modules.arguments import AnyMask, Source, check_tokens, token_mask
from attention_jax._modules.walk import Step, check_sampling, likeliest, sampler, walk
from attention_jax.cache import KVCache
from attention_jax.masks import Mask
from attention_jax.nnx.language import TransformerLM
from attention_jax.nnx.transformer import Transformer

Model = Transformer | TransformerLM


class Ends(NamedTuple):
    """The ids that begin, end and fill a sentence."""

    bos: Array
    eos: Array
    pad: Array


def greedy_decode(
    model: Model,
    source: Source,
    *,
    bos: int | None = None,
    eos: int | None = None,
    max_length: int,
    source_mask: AnyMask = None,
    pad: int = 0,
) -> Int[Array, "*B L"]:
    """The sentence that takes the likeliest token at each step.

        y_t = argmax p(y | bos, y_1, …, y_{t-1}, source)

    One compiled loop, compiled once for each model structure, shape and `max_length`; it ends as
    soon as every sentence has its end. Dropout is left out.

    Args:
        model: A `Transformer`, or a `TransformerLM` that continues `source`.
        source: Ids `[*B, S]`: a translation's source, or a language model's prompt.
        bos: The id that begins every sentence; it is not part of the result. None for a language
            model, which goes on after its prompt.
        eos: The id that ends a sentence; it is part of the result. None, for a language model, is
            no such id.
        max_length: L, the most tokens to make.
        source_mask: Which source tokens are real: a boolean array `[*B, S]`, or, for a
            `Transformer`, a mask object. A prompt may be padded on either side.
        pad: What stands after the end of a sentence.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        ValueError: If `max_length` is not positive, or `bos` or `eos` does not suit the model.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import Transformer, greedy_decode
        >>> model = Transformer(1, 2, 8, 16, 11, 13, rngs=nnx.Rngs(0))
        >>> source = jnp.ones((3, 5), int)
        >>> greedy_decode(model, source, bos=1, eos=2, max_length=6).shape
        (3, 6)
    """
    return _loop(*_arguments(model, source, source_mask, bos, eos, pad, max_length))


def sample_decode(
    model: Model,
    source: Source,
    key: PRNGKeyArray,
    *,
    bos: int | None = None,
    eos: int | None = None,
    max_length: int,
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int | None = None,
    source_mask: AnyMask = None,
    pad: int = 0,
) -> Int[Array, "*B L"]:
    """Sentences drawn token by token from the model's own probabilities, or a part of them.

        y_t ~ softmax(logits_t / temperature), among the top k, among the top p of those

    Args:
        model: As in `greedy_decode`; so are the arguments not listed here.
        source: As in `greedy_decode`.
        key: A PRNG key; equal keys give equal sentences.
        bos: As in `greedy_decode`.
        eos: As in `greedy_decode`.
        max_length: As in `greedy_decode`.
        temperature: Positive; above 1 is more varied, below 1 less.
        top_k: How many of the likeliest tokens may be drawn; None is all.
        top_p: In (0, 1]: the likeliest tokens are kept until their probabilities sum to it; None is
            all.
        source_mask: As in `greedy_decode`.
        pad: As in `greedy_decode`.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        ValueError: If an option is out of range.

    References:
        Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation", arXiv:1805.04833, §5.4.
        Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751,
        eq. 2-3.
    """
    check_sampling(temperature, top_k, top_p)
    arguments = _arguments(model, source, source_mask, bos, eos, pad, max_length)
    return _sampled(*arguments, top_k, key, temperature, top_p)


def beam_decode(
    model: Model,
    source: Source,
    *,
    bos: int | None = None,
    eos: int,
    max_length: int,
    num_beams: int,
    length_penalty: float | int = 0.6,
    source_mask: AnyMask = None,
    pad: int = 0,
) -> tuple[Int[Array, "*B M L"], Float[Array, "*B M"]]:
    """The likeliest sentences that a beam search finds.

        score(y) = log p(y | source) / ((5 + |y|) / 6)^length_penalty

    The search ends once no live beam can overtake the worst of the `num_beams` that have ended.

    Args:
        model: As in `greedy_decode`; so are the arguments not listed here.
        source: As in `greedy_decode`.
        bos: As in `greedy_decode`.
        eos: As in `greedy_decode`.
        max_length: As in `greedy_decode`.
        num_beams: M, how many beginnings are kept.
        length_penalty: 0 leaves log-probabilities alone; larger values favour longer sentences.
        source_mask: As in `greedy_decode`.
        pad: As in `greedy_decode`.

    Returns:
        Ids `[*B, num_beams, max_length]`, the best first, and their scores `[*B, num_beams]`.

    Raises:
        ValueError: If an option is out of range.

    References:
        Wu et al. 2016, "Google's Neural Machine Translation System", arXiv:1609.08144, eq. 14.
    """
    check_count("num_beams", num_beams, 1)
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty must not be negative, got {length_penalty}")
    arguments = _arguments(model, source, source_mask, bos, eos, pad, max_length)
    return _beams(*arguments, num_beams, jnp.asarray(length_penalty, jnp.float32))


def _arguments(
    model: Model, source: Any, mask: AnyMask, bos: Any, eos: Any, pad: Any, length: int
) -> tuple[Any, ...]:
    """Everything checked, as `_loop` takes it."""
    check_count("max_length", length, 1)
    check_tokens("source", source)
    if isinstance(model, TransformerLM):
        if bos is not None:
            raise ValueError("a language model goes on after its prompt: give no bos")
        if np.shape(source)[-1] == 0:
            raise ValueError("a prompt must have at least one token")
        if isinstance(mask, Mask):
            raise TypeError("the source_mask of a prompt must be a boolean array [*B, S]")
        if mask is not None and np.shape(mask) != np.shape(source):
            raise ValueError(
                f"source_mask has shape {list(np.shape(mask))} but must be that of the prompt, "
                f"{list(np.shape(source))}"
            )
    elif bos is None or eos is None:
        raise ValueError("a Transformer's sentences need a bos and an eos")
    mask = mask if mask is None else token_mask("source_mask", mask, np.shape(source))
    # No id is negative: without an end every sentence goes on.
    ends = Ends(*(jnp.asarray(-1 if x is None else x, jnp.int32) for x in (bos, eos, pad)))
    graph, state = nnx.split(model)
    return graph, state, jnp.asarray(source), mask, ends, length


def _begin(
    model: Model, source: Array, mask: Any, ends: Ends, length: int
) -> tuple[Step, Array, Any]:
    """One step of the model, the token before the first one to make, and the state before it."""
    if isinstance(model, TransformerLM):
        return _after_prompt(model, source, mask, length)
    memory = model.encode(source, mask, deterministic=True)

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        logits, state = model.with_cache(token[..., None], state, mask, deterministic=True)
        return logits[..., 0, :], state

    first = jnp.broadcast_to(ends.bos, source.shape[:-1])
    return step, first, model.new_cache(memory, length)


def _after_prompt(
    model: TransformerLM, prompt: Array, mask: Any, length: int
) -> tuple[Step, Array, Any]:
    """The prompt is read but for its last token, with which the loop begins."""

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        logits, state = model.with_cache(token[..., None], state, deterministic=True)
        return logits[..., 0, :], state

    valid = None
    if mask is not None:
        real = mask.array.reshape(prompt.shape)
        # Padding moves to the left, so that every prompt ends in the last column.
        order = jnp.argsort(real, axis=-1, stable=True)
        prompt = jnp.take_along_axis(prompt, order, axis=-1)
        valid = jnp.take_along_axis(real, order, axis=-1)[..., :-1]
    size = prompt.shape[-1] - 1
    state = model.new_cache(prompt.shape[:-1], size + length)
    if size:
        read = prompt[..., :-1]
        state = model.with_cache(read, state, valid=valid, deterministic=True)[1]
    return step, prompt[..., -1].astype(jnp.int32), state


@functools.partial(jax.jit, static_argnums=(0, 5))
def _loop(
    graph: Any, state: Any, source: Array, mask: Mask | None, ends: Any, length: int
) -> Array:
    model: Model = nnx.merge(graph, state)
    begun = _begin(model, source, mask, ends, length)
    return walk(*begun, likeliest, length=length, eos=ends.eos, pad=ends.pad)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _sampled(
    graph: Any,
    state: Any,
    source: Array,
    mask: Mask | None,
    ends: Any,
    length: int,
    top_k: int | None,
    key: Array,
    temperature: Any,
    top_p: Any,
) -> Array:
    model: Model = nnx.merge(graph, state)
    begun = _begin(model, source, mask, ends, length)
    choose = sampler(key, temperature, top_k, top_p)
    return walk(*begun, choose, length=length, eos=ends.eos, pad=ends.pad)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _beams(
    graph: Any,
    state: Any,
    source: Array,
    mask: Mask | None,
    ends: Any,
    length: int,
    beams: int,
    length_penalty: Array,
) -> tuple[Array, Array]:
    model: Model = nnx.merge(graph, state)
    step, first, begun = _begin(model, source, mask, ends, length)

    def spread(cache: KVCache) -> KVCache:
        alone = jax.tree.map(lambda x: x if x.ndim == 0 else x[None], cache)
        return alone.reorder(jnp.zeros((beams,), jnp.int32), axis=0)

    def move(state: Any, order: Array) -> Any:
        return _each_cache(lambda cache: cache.reorder(order, axis=0), state)

    return beam.search(
        step,
        jnp.broadcast_to(first, (beams, *first.shape)),
        _each_cache(spread, begun),
        move,
        length=length,
        eos=ends.eos,
        pad=ends.pad,
        length_penalty=length_penalty,
    )


def _each_cache(change: Callable[[KVCache], KVCache], state: Any) -> Any:
    """The state with every cache changed, those of scanned layers layer by layer."""

    def one(cache: KVCache) -> KVCache:
        return change(cache) if cache.index.ndim == 0 else jax.vmap(change)(cache)

    return jax.tree.map(one, state, is_leaf=lambda node: isinstance(node, KVCache))
