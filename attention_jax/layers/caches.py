"""Helpers for caches: those of a whole model, and masks and scores over a growing sequence."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Shape
from attention_jax._core.checks import as_array
from attention_jax._core.pytrees import serializable_tuple
from attention_jax.cache import KVCache
from attention_jax.masks import Mask
from attention_jax.masks.buffer import check_reach
from attention_jax.masks.mask import Interval
from attention_jax.scores import Score
from attention_jax.scores.modifiers import LogLength


@serializable_tuple
class DecoderCache(NamedTuple):
    """The state of one decoder layer between steps.

    Attributes:
        own: Keys and values of the tokens so far.
        memory: Keys and values of the memory, which are constant.
    """

    own: KVCache
    memory: KVCache


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def unpadded(key: Array, value: Array, index: Array) -> dict[str, Array]:
    """The fields of a cache without padding or overflow, which are those of Flax's cache."""
    *batch, length, _, _ = key.shape
    slots = jnp.arange(length, dtype=jnp.int32)
    positions = jnp.where(slots < index, slots, -1).reshape((1,) * len(batch) + (length,))
    return {
        "key": key,
        "value": value,
        "index": index,
        "token_positions": jnp.broadcast_to(positions, (*batch, length)),
        "lengths": jnp.full(tuple(batch), index, jnp.int32),
        "overflowed": jnp.zeros(tuple(batch), bool),
    }


def first_cache(cache: Any) -> KVCache:
    """The first layer's cache of tokens in a stack's caches: all layers have the same index.

    Raises:
        TypeError: If there is no cache.
    """
    first = next(iter(jax.tree.leaves(cache, is_leaf=_is_cache)), None)
    if not isinstance(first, KVCache):
        raise TypeError(
            f"cache must be what new_cache or new_memory_cache returns, got {type(cache).__name__}"
        )
    return first if first.index.ndim == 0 else jax.tree.map(lambda leaf: leaf[0], first)


def memory_shape(cache: Any) -> Shape:
    """`[*B, S]`, the shape of a mask of the memory's tokens, from a decoder's caches."""
    memory: KVCache = jax.tree.leaves(cache, is_leaf=_is_cache)[1]
    layers = memory.index.ndim
    return (*memory.batch, memory.length)[layers:]


def check_batch(name: str, x: Any, cache: Any, axes: int = 2) -> None:
    """Checks that the next tokens have the cache's batch axes.

    Args:
        name: The argument's name.
        x: The next tokens: ids, or inputs.
        cache: A cache, or those of a stack.
        axes: The number of axes of `x` that are not batch axes.

    Raises:
        TypeError: If one of the two is of another type.
        ValueError: If the batch axes differ.
    """
    shape, batch = np.shape(as_array(name, x)), first_cache(cache).batch
    if len(shape) < axes or shape[: len(shape) - axes] != batch:
        given = list(shape[: max(len(shape) - axes, 0)])
        has = "have" if name.endswith("s") else "has"
        raise ValueError(f"{name} {has} batch {given} but the cache {list(batch)}")


def check_window(cache: KVCache, mask: Mask | None) -> None:
    """Checks that a rolling cache holds every key visible under a layer's and a call's mask.

    Raises:
        ValueError: If the mask extends further back, or to an unknown distance.
    """
    if cache.rolling:
        check_reach(cache.length, Interval(None, None) if mask is None else mask.interval())


def with_beams(cache: KVCache, count: int) -> KVCache:
    """The cache with a new leading batch axis of `count` equal beams."""
    names = ("key", "value", "token_positions", "lengths", "overflowed")
    every = {name: getattr(cache, name)[None] for name in names}
    every = {name: jnp.broadcast_to(x, (count, *x.shape[1:])) for name, x in every.items()}
    return dataclasses.replace(cache, **every)


def each_cache(change: Callable[[KVCache], KVCache], state: Any) -> Any:
    """Maps a function over every cache of the state; caches of scanned layers are unstacked."""

    def one(cache: KVCache) -> KVCache:
        return change(cache) if cache.index.ndim == 0 else jax.vmap(change)(cache)

    return jax.tree.map(one, state, is_leaf=_is_cache)


def by_position(mask: Mask | None) -> Mask | None:
    """The mask over a cache of self-attention, whose lengths are not the buffer's."""
    return None if mask is None else mask.by_position()


def counted(score: Score, count: Any) -> Score:
    """The score, in which `log_length` uses `count` keys, `[*B]`, not the buffer's length."""

    def by_length(node: Any) -> bool:
        return isinstance(node, LogLength) and node.length is None

    def change(node: Any) -> Any:
        if not by_length(node):
            return node
        return dataclasses.replace(node, score=counted(node.score, count), length=count)

    return jax.tree.map(change, score, is_leaf=by_length)
