"""Generation of sequences by a trained model of either flavour.

The source or prompt is encoded once, and each step computes one token over a cache. A model is
represented by `call_model(method, *arguments, **options)`, which calls one of its methods.
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
from attention_jax._core.pytrees import static
from attention_jax.layers import beam_search
from attention_jax.layers.arguments import (
    AnyMask,
    check_tokens,
    is_integer,
    token_ids,
    token_mask,
)
from attention_jax.layers.caches import each_cache, with_beams
from attention_jax.layers.sampling import Step, generate, likeliest, sampler
from attention_jax.masks import Mask

CallModel = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draw:
    """The options of sampling: a key, and the arguments of `sampling.sampler`.

    A known `top_k` is static, because selecting a few tokens is faster than sorting all of them.
    """

    key: Any
    temperature: Any
    top_p: Any
    traced_top_k: Any
    top_k: int | None = static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Task:
    """The checked arguments of a generation; a pytree, so that calls share compiled code.

    Attributes:
        source: Ids `[*B, S]`: a translation's source, or a prompt.
        mask: Which ids are real: a boolean array `[*B, S]`, or a mask of keys.
        bos: The id that begins a sentence, a scalar or `[*B]`; -1 for a prompt.
        eos: Ids `[E]`, each of which ends a sentence.
        pad: The id after the end.
        prompt: Whether the model continues `source`.
        length: The maximum number of tokens.
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
    length: Any,
    prompt: bool,
    source_vocab: int | None,
    target_vocab: int | None,
) -> Task:
    """The checked arguments of a decoding call; a vocabulary of None is of unknown size.

    Raises:
        TypeError: If an id is not an integer, or a prompt's mask is not an array.
        ValueError: If shapes do not fit, `bos` or `eos` does not suit the model, or `bos`, `eos` or
            an unmasked id of the source is known to be outside the vocabulary.
    """
    _check_size("max_length", length)
    check_tokens("source", source)
    if prompt:
        if bos is not None:
            raise ValueError(
                "bos is not accepted for TransformerLM: generation continues from the prompt"
            )
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
    bos = jnp.int32(-1) if bos is None else token_ids("bos", bos, target_vocab)
    eos = token_ids("eos", () if eos is None else eos, target_vocab)
    pad = token_ids("pad", pad, None)  # never embedded, so any integer is valid
    batch = np.shape(source)[:-1]
    for name, ids, shapes, words in (
        ("bos", bos, ((), batch), f"one id, or one for each example {list(batch)}"),
        ("eos", eos, ((), (eos.size,)), "one id, or several in a sequence"),
        ("pad", pad, ((),), "one id"),
    ):
        if ids.shape not in shapes:
            raise ValueError(f"{name} must be {words}, got shape {list(ids.shape)}")
    check_tokens("source", source, source_vocab, token_mask("source_mask", mask, source.shape))
    mask = mask if mask is None or isinstance(mask, Mask) else jnp.asarray(mask)
    ends = {"bos": bos, "eos": eos.reshape(-1), "pad": pad}
    return Task(jnp.asarray(source), mask, **ends, prompt=prompt, length=length)


def draw(key: Any, temperature: Any, top_k: Any, top_p: Any) -> Draw:
    """Checks the options of sampling.

    Raises:
        TypeError: If the key is not a key, or an option is not a number.
        ValueError: If an option is known and out of range.
    """
    check_key("key", key)
    temperature = _number("temperature", temperature)
    if is_concrete(temperature) and not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; for the likeliest token decode "
            "greedily"
        )
    if top_p is not None:
        top_p = _number("top_p", top_p)
        if is_concrete(top_p) and not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if top_k is None:
        return Draw(key, temperature, top_p, None, None)
    if not is_integer(top_k) or np.ndim(top_k):
        raise TypeError(f"top_k must be one integer, got {_shown(top_k)}")
    if not is_concrete(top_k):
        return Draw(key, temperature, top_p, top_k, None)
    return Draw(key, temperature, top_p, None, check_count("top_k", int(np.asarray(top_k)), 1))


def check_beams(num_beams: Any, length_penalty: Any) -> Array:
    """Checks the number of beams and returns the length penalty.

    Raises:
        TypeError: If an option is not a number.
        ValueError: If an option is known and out of range.
    """
    _check_size("num_beams", num_beams)
    length_penalty = _number("length_penalty", length_penalty)
    if is_concrete(length_penalty) and not length_penalty >= 0:
        raise ValueError(f"length_penalty must not be negative, got {length_penalty}")
    return jnp.asarray(length_penalty, jnp.float32)


def _check_size(name: str, value: Any) -> None:
    if not is_concrete(value):
        raise TypeError(
            f"{name} is a size of the result and cannot be traced: give a Python integer, under "
            "jit a static argument"
        )
    check_count(name, value, 1)


def _number(name: str, x: Any) -> Any:
    """A real scalar: a float if it is concrete, else a traced scalar."""
    plain = isinstance(x, (int, float, np.number)) and not isinstance(x, bool)
    dtype = getattr(x, "dtype", None)
    real = dtype is not None and (
        jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    )
    if np.ndim(x) or not (plain or real):
        raise TypeError(f"{name} must be one number, got {_shown(x)}")
    return float(np.asarray(x)) if is_concrete(x) else x


def _shown(x: Any) -> str:
    return f"shape {list(x.shape)} of {x.dtype}" if hasattr(x, "dtype") else repr(x)


def sentence(call_model: CallModel, task: Task, draw: Draw | None) -> Array:
    """Greedy decoding or sampling: ids `[*B, length]`."""
    choose = likeliest
    if draw is not None:
        top_k = draw.traced_top_k if draw.top_k is None else draw.top_k
        choose = sampler(draw.key, draw.temperature, top_k, draw.top_p)
    begun = _begin(call_model, task)
    return generate(*begun, choose, length=task.length, eos=task.eos, pad=task.pad)


def beams(
    call_model: CallModel, task: Task, num_beams: int, length_penalty: Array
) -> tuple[Array, Array]:
    """Beam search: sentences `[*B, M, length]` and their scores `[*B, M]`."""
    step, first, begun = _begin(call_model, task)

    def move(state: Any, order: Array) -> Any:
        return each_cache(lambda cache: cache.reorder(order, axis=0), state)

    return beam_search.search(
        step,
        jnp.broadcast_to(first, (num_beams, *first.shape)),
        each_cache(lambda cache: with_beams(cache, num_beams), begun),
        move,
        length=task.length,
        eos=task.eos,
        pad=task.pad,
        length_penalty=length_penalty,
    )


def _begin(call_model: CallModel, task: Task) -> tuple[Step, Array, Any]:
    """The model's step function, the token before the first generated one, the initial state."""
    if task.prompt:
        return _after_prompt(call_model, task)
    memory = call_model("encode", task.source, task.mask, deterministic=True)
    # As a mask of keys, which also broadcasts over beams before the batch.
    key_mask = token_mask("source_mask", task.mask, task.source.shape)

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        token = token[..., None]
        logits, state = call_model("with_cache", token, state, key_mask, deterministic=True)
        return logits[..., 0, :], state

    first = jnp.broadcast_to(task.bos, task.source.shape[:-1])
    return step, first, call_model("new_cache", memory, task.length)


def _after_prompt(call_model: CallModel, task: Task) -> tuple[Step, Array, Any]:
    """Caches the prompt except its last token, which is the loop's first input."""

    def step(token: Array, state: Any) -> tuple[Array, Any]:
        logits, state = call_model("with_cache", token[..., None], state, deterministic=True)
        return logits[..., 0, :], state

    prompt, valid = task.source, None
    if task.mask is not None:
        real = jnp.asarray(task.mask)  # checked to be an array
        # Moves padding to the left, so that every prompt ends in the last column.
        order = jnp.argsort(real, axis=-1, stable=True)
        prompt = jnp.take_along_axis(prompt, order, axis=-1)
        valid = jnp.take_along_axis(real, order, axis=-1)[..., :-1]
    size = prompt.shape[-1] - 1
    state = call_model("new_cache", prompt.shape[:-1], size + task.length)
    if size:
        options = {"valid": valid, "deterministic": True}
        _, state = call_model("with_cache", prompt[..., :-1], state, **options)
    return step, prompt[..., -1].astype(jnp.int32), state
