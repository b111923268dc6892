"""Decoding with a trained Linen model."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from attention_jax._core.axes import Array
from attention_jax._core.compiled import compiled
from attention_jax.layers import decoding, generation
from attention_jax.layers.decoding import Decoder
from attention_jax.layers.flavours import for_flavour
from attention_jax.layers.generation import Draw, Task
from attention_jax.linen.transformer import Transformer, TransformerLM

Model = Transformer | TransformerLM
Variables = Mapping[str, Any]
P = ParamSpec("P")
Out = TypeVar("Out")


def _decoder(model: Model, variables: Variables) -> Decoder:
    given = (model.clone(), variables)
    sentence, beams = (functools.partial(run, *given) for run in (_sentence, _beams))
    if isinstance(model, TransformerLM):
        return Decoder(True, model.vocab, model.vocab, sentence, beams)
    return Decoder(False, model.source_vocab, model.target_vocab, sentence, beams)


def _calls(model: Model, variables: Variables) -> Callable[..., Any]:
    return lambda method, *given, **options: model.apply(
        variables, *given, method=method, **options
    )


@functools.partial(compiled, static=(0,))
def _sentence(model: Model, variables: Variables, task: Task, draw: Draw | None) -> Array:
    return generation.sentence(_calls(model, variables), task, draw)


@functools.partial(compiled, static=(0, 3))
def _beams(
    model: Model, variables: Variables, task: Task, num_beams: int, length_penalty: Array
) -> tuple[Array, Array]:
    return generation.beams(_calls(model, variables), task, num_beams, length_penalty)


def _of(
    decode: Callable[Concatenate[Decoder, P], Out], example: str = ""
) -> Callable[Concatenate[Model, Variables, P], Out]:
    return for_flavour(decode, _decoder, example, base=decoding.greedy_decode)


greedy_decode = _of(
    decoding.greedy_decode,
    """For Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import Transformer, greedy_decode
        >>> model, source = Transformer(1, 2, 8, 16, 11, 13), jnp.ones((3, 5), int)
        >>> variables = model.init(jax.random.key(0), source, source)
        >>> greedy_decode(model, variables, source, bos=1, eos=2, max_length=6).shape
        (3, 6)
    """,
)
sample_decode = _of(decoding.sample_decode)
beam_decode = _of(decoding.beam_decode)
