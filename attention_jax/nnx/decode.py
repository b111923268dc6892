"""Decoding with a trained NNX model."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.compiled import compiled
from attention_jax.layers import decoding, generation
from attention_jax.layers.arguments import vocabulary
from attention_jax.layers.decoding import Decoder
from attention_jax.layers.flavours import for_flavour
from attention_jax.layers.generation import Draw, Task
from attention_jax.nnx.transformer import Transformer, TransformerLM

Model = Transformer | TransformerLM
P = ParamSpec("P")
Out = TypeVar("Out")


def _decoder(model: Model) -> Decoder:
    prompt = isinstance(model, TransformerLM)
    names = ("embedding",) * 2 if prompt else ("source_embedding", "target_embedding")
    # A subclass may embed its tokens in another way.
    source, target = (vocabulary(getattr(model, name, None)) for name in names)
    sentence, beams = (functools.partial(run, *nnx.split(model)) for run in (_sentence, _beams))
    return Decoder(prompt, source, target, sentence, beams)


def _calls(graph: Any, state: Any) -> Callable[..., Any]:
    model = nnx.merge(graph, state)
    return lambda method, *given, **options: getattr(model, method)(*given, **options)


@functools.partial(compiled, static=(0,))
def _sentence(graph: Any, state: Any, task: Task, draw: Draw | None) -> Array:
    return generation.sentence(_calls(graph, state), task, draw)


@functools.partial(compiled, static=(0, 3))
def _beams(
    graph: Any, state: Any, task: Task, num_beams: int, length_penalty: Array
) -> tuple[Array, Array]:
    return generation.beams(_calls(graph, state), task, num_beams, length_penalty)


def _of(
    decode: Callable[Concatenate[Decoder, P], Out], example: str = ""
) -> Callable[Concatenate[Model, P], Out]:
    return for_flavour(decode, _decoder, example, base=decoding.greedy_decode)


greedy_decode = _of(
    decoding.greedy_decode,
    """For NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import Transformer, greedy_decode
        >>> model = Transformer(1, 2, 8, 16, 11, 13, rngs=nnx.Rngs(0))
        >>> source = jnp.ones((3, 5), int)
        >>> greedy_decode(model, source, bos=1, eos=2, max_length=6).shape
        (3, 6)
    """,
)
sample_decode = _of(decoding.sample_decode)
beam_decode = _of(decoding.beam_decode)
