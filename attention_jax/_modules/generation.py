"""From a trained model to sentences, in either flavour: what is asked for, and how it is made.

The source is encoded once, a prompt read once, and each step computes one token over a cache. A
model is known here by `ask(method, *arguments, **options)`, which calls one of its methods.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count, check_key
from attention_jax._core.numerics import is_concrete
from attention_jax._core.record import static
from attention_jax._modules import beam
from attention_jax._modules.arguments import AnyMask, check_tokens, token_mask
from attention_jax._modules.caches import each_cache
from attention_jax._modules.walk import Step, check_sampling, likeliest, sampler, walk
from attention_jax.cache import KVCache
from attention_jax.masks import Mask

Ask = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """How tokens are drawn: a key, and what `walk.sampler` takes."""

    key: Any
    temperature: Any
    top_p: Any
    top_k: int | None = static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Task:
    """What is to be made, checked; a pytree, so that one compiled loop serves all of a kind.

    Attributes:
        source: Ids `[*B, S]`: a translation's source, or a prompt.
        mask: Which of them are real: a boolean array `[*B, S]`, or a mask of keys.
        bos: The id that begins a sentence; so on for `eos` and `pad`; -1 is none.
        prompt: Whether the model goes on after `source`.
        length: The most tokens to make.
    """

    source: Any
    mask: AnyMask
    bos: Array
    eos: Array
    pad: Array
    prompt: bool = static()
    length: int = static()


def task(
    source: Any,
    mask: AnyMask,
    *,
    bos: Any,
    eos: Any,
    pad: Any,
    length: int,
    prompt: bool,
    source_vocab: int | None,
    target_vocab: int | None,
) -> Task:
    """What a call of a decoder asks for; a vocabulary of None is of unknown size.

    Raises:
        TypeError: If the source holds no ids, or a prompt's mask is no array.
        ValueError: If something does not fit, `bos` or `eos` does not suit the model, or `bos` or
            a source's id that is known lies outside the vocabulary; one that the mask hides may.
    """
    check_count("max_length", length, 1)
    check_tokens("source", source)
    if prompt:
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
    # No id is negative: without an end every sentence goes on.
    ends = (jnp.asarray(-1 if x is None else x, jnp.int32) for x in (bos, eos, pad))
    # An end that no token is ends nothing, and what stands after one need not be a token.
    wrong = None if bos is None else _outside(bos, target_vocab)
    if wrong is not None:
        raise ValueError(f"bos is {wrong.item()}, but the vocabulary has {target_vocab}")
    _check_source(source, token_mask("source_mask", mask, np.shape(source)), source_vocab)
    mask = mask if mask is None or isinstance(mask, Mask) else jnp.asarray(mask)
    return Task(jnp.asarray(source), mask, *ends, prompt=prompt, length=length)


def _outside(ids: Any, vocab: int | None, real: Any = True) -> Any:
    """The first of the real ids that is known and lies outside the vocabulary; None if none is."""
    if vocab is None or not is_concrete(ids) or not getattr(ids, "is_fully_addressable", True):
        return None
    known = np.asarray(ids)
    wrong = known[((known < 0) | (known >= vocab)) & real]
    return wrong[0] if wrong.size else None


def _check_source(source: Any, mask: Mask | None, vocab: int | None) -> None:
    """Raises a ValueError where a real token is none of the vocabulary's."""
    wrong = _outside(source, vocab)
    if wrong is not None and mask is not None:
        if not is_concrete(mask):
            return
        with jax.ensure_compile_time_eval():
            seen: Any = np.asarray(mask.to_array(1, source.shape[-1]))
        real = seen.any(axis=tuple(range(-min(seen.ndim, 3), -1)))
        wrong = _outside(source, vocab, np.broadcast_to(real, source.shape))
    if wrong is not None:
        raise ValueError(f"source holds id {wrong}, but the vocabulary has {vocab}")


def draw(key: Any, temperature: Any, top_k: int | None, top_p: Any) -> Draw:
    """How tokens are drawn, checked.

    Raises:
        TypeError: If the key is none.
        ValueError: If an option is out of range.
    """
    check_key("key", key)
    check_sampling(temperature, top_k, top_p)
    return Draw(key, temperature, top_p, top_k)


def check_beams(num_beams: int, length_penalty: float | int) -> None:
    """Raises a ValueError where an option of `beams` is out of range."""
    check_count("num_beams", num_beams, 1)
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty must not be negative, got {length_penalty}")


def sentence(ask: Ask, task: Task, draw: Draw | None) -> Array:
    """The sentence of the likeliest tokens, or of drawn ones: ids `[*B, length]`."""
    choose = likeliest
    if draw is not None:
        choose = sampler(draw.key, draw.temperature, draw.top_k, draw.top_p)
    begun = _begin(ask, task)
    return walk(*begun, choose, length=task.length, eos=task.eos, pad=task.pad)


def beams(ask: Ask, task: Task, num_beams: int, length_penalty: Array) -> tuple[Array, Array]:
    """The likeliest sentences of a beam search, `[*B, M, length]`, and their scores `[*B, M]`."""
    step, first, begun = _begin(ask, task)

    def spread(cache: KVCache) -> KVCache:
        alone = jax.tree.map(lambda x: x if x.ndim == 0 else x[None], cache)
        return alone.reorder(jnp.zeros((num_beams,), jnp.int32), axis=0)

    def move(state: Any, order: Array) -> Any:
        return each_cache(lambda cache: cache.reorder(order, axis=0), state)

    return beam.search(
        step,
        jnp.broadcast_to(first, (num_beams, *first.shape)),
        each_cache(spread, begun),
        move,
        length=task.length,
        eos=task.eos,
        pad=task.pad,
        length_penalty=length_penalty,
    )


def _begin(ask: Ask, task: Task) -> tuple[Step, Array, Any]:
    """One step of the model, the token before the first one to make, and the state before it."""
    if task.prompt:
        return _after_prompt(ask, task)
    memory = ask("encode", task.source, task.mask, deterministic=True)
    # As a mask of keys, which holds for beams in front of the batch too.
    seen = token_mask("source_mask", task.mask, task.source.shape)

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        token = token[..., None]
        logits, state = ask("with_cache", token, state, seen, deterministic=True)
        return logits[..., 0, :], state

    first = jnp.broadcast_to(task.bos, task.source.shape[:-1])
    return step, first, ask("new_cache", memory, task.length)


def _after_prompt(ask: Ask, task: Task) -> tuple[Step, Array, Any]:
    """The prompt is read but for its last token, with which the loop begins."""

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        logits, state = ask("with_cache", token[..., None], state, deterministic=True)
        return logits[..., 0, :], state

    prompt, valid = task.source, None
    if task.mask is not None:
        real = jnp.asarray(task.mask)  # an array, as it is checked to be
        # Padding moves to the left, so that every prompt ends in the last column.
        order = jnp.argsort(real, axis=-1, stable=True)
        prompt = jnp.take_along_axis(prompt, order, axis=-1)
        valid = jnp.take_along_axis(real, order, axis=-1)[..., :-1]
    size = prompt.shape[-1] - 1
    state = ask("new_cache", prompt.shape[:-1], size + task.length)
    if size:
        state = ask("with_cache", prompt[..., :-1], state, valid=valid, deterministic=True)[1]
    return step, prompt[..., -1].astype(jnp.int32), state
