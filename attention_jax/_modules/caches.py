"""The caches of a whole model: one for each layer, in whatever tree the layers have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from attention_jax.cache import KVCache


class DecoderCache(NamedTuple):
    """What one decoder layer keeps between steps.

    Attributes:
        own: Keys and values of the tokens so far.
        memory: Keys and values of the memory, which stay.
    """

    own: KVCache
    memory: KVCache


def _is_cache(node: Any) -> bool:
    return isinstance(node, KVCache)


def first_cache(cache: Any) -> KVCache:
    """The first layer's cache of tokens, from a stack's, scanned or not: all stand alike."""
    first: KVCache = jax.tree.leaves(cache, is_leaf=_is_cache)[0]
    return first if first.index.ndim == 0 else jax.tree.map(lambda leaf: leaf[0], first)


def each_cache(change: Callable[[KVCache], KVCache], state: Any) -> Any:
    """The state with every cache changed, those of scanned layers layer by layer."""

    def one(cache: KVCache) -> KVCache:
        return change(cache) if cache.index.ndim == 0 else jax.vmap(change)(cache)

    return jax.tree.map(one, state, is_leaf=_is_cache)
