"""From a trained model to sentences, one token at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import AnyMask, Source, check_tokens, token_mask
from attention_jax.masks import Mask
from attention_jax.nnx.transformer import Transformer


def greedy_decode(
    model: Transformer,
    source: Source,
    *,
    bos: int,
    eos: int,
    max_length: int,
    source_mask: AnyMask = None,
    pad: int = 0,
) -> Int[Array, "*B L"]:
    """The translation that takes the likeliest token at each step.

        y_t = argmax p(y | bos, y_1, …, y_{t-1}, source)

    One compiled loop, compiled once for each model structure, shape and `max_length`; it ends as
    soon as every sentence has its end. Dropout is left out. Each step runs the decoder over the
    prefix again.

    Args:
        model: A `Transformer`.
        source: Ids `[*B, S]`.
        bos: The id that begins every sentence; it is not part of the result.
        eos: The id that ends a sentence; it is part of the result.
        max_length: L, the most tokens to make.
        source_mask: Which source tokens are real: a boolean array `[*B, S]` or a mask object.
        pad: What stands after the end of a sentence.

    Returns:
        Ids `[*B, max_length]`, int32.

    Raises:
        ValueError: If `max_length` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import Transformer, greedy_decode
        >>> model = Transformer(1, 2, 8, 16, 11, 13, rngs=nnx.Rngs(0))
        >>> source = jnp.ones((3, 5), int)
        >>> greedy_decode(model, source, bos=1, eos=2, max_length=6).shape
        (3, 6)
    """
    check_count("max_length", max_length, 1)
    check_tokens("source", source)
    graph, state = nnx.split(model)
    ends = tuple(jnp.asarray(token, jnp.int32) for token in (bos, eos, pad))
    mask = token_mask("source_mask", source_mask, np.shape(source))
    return _loop(graph, state, jnp.asarray(source), mask, ends, max_length)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _loop(
    graph: Any,
    state: Any,
    source: Array,
    mask: Mask | None,
    ends: tuple[Array, Array, Array],
    length: int,
) -> Array:
    bos, eos, pad = ends
    model: Transformer = nnx.merge(graph, state)
    memory = model.encode(source, mask, deterministic=True)
    batch = source.shape[:-1]
    # One place more than there are tokens to make: the first is the beginning.
    tokens = jnp.full((*batch, length + 1), pad).at[..., 0].set(bos)

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        step, done, _ = carry
        return (step < length) & ~jnp.all(done)

    def extend(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, done, tokens = carry
        # What stands beyond the step is not seen: self-attention is causal.
        states = model.decode_states(tokens[..., :-1], memory, None, mask, deterministic=True)
        here = jax.lax.dynamic_slice_in_dim(states, step, 1, axis=-2)
        best = jnp.argmax(model.logits(here)[..., 0, :], axis=-1).astype(tokens.dtype)
        token = jnp.where(done, pad, best)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[..., None], step + 1, axis=-1)
        return step + 1, done | (token == eos), tokens

    start = (jnp.zeros((), jnp.int32), jnp.zeros(batch, bool), tokens)
    return jax.lax.while_loop(unfinished, extend, start)[2][..., 1:]
