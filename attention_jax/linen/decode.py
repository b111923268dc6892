"""Flax's cache of keys and values: the collection "cache", under Flax's own names."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._core.numerics import is_concrete
from attention_jax.masks import Mask


class Step(NamedTuple):
    """What a decoding step attends to.

    Attributes:
        key: All the keys there is room for, `[*B, L, K, H]`.
        value: Their values, `[*B, L, K, V]`.
        mask: Lets each query see what stands at its own position and before.
        positions: Where queries and keys stand, as arguments of the engine.
        valid: Whether there was room; None where that is known.
    """

    key: Array
    value: Array
    mask: Mask
    positions: dict[str, Any]
    valid: Array | None


def extend(module: nn.Module, key: Array, value: Array, *, keep: bool) -> Step:
    """Puts the next keys and values behind those in the cache.

    Args:
        module: The module that owns the cache, inside its compact method. Without a cache it makes
            one, as long as `key`, with nothing in it.
        key: `[*B, T, K, H]`, of the T next tokens.
        value: `[*B, T, K, V]`.
        keep: Whether the cache keeps them.

    Returns:
        What the step attends to.

    Raises:
        ValueError: If the shapes are not the cache's, or there is no room and that is known.
    """
    started = module.has_variable("cache", "cached_key")
    cached_key = module.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
    cached_value = module.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
    cache_index = module.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
    if not started:
        return Step(key, value, masks.causal(), {}, None)
    index, length = cache_index.value, cached_key.value.shape[-3]
    new, room = key.shape[-3], cached_key.value.shape
    if key.shape != (*room[:-3], new, *room[-2:]):
        raise ValueError(
            f"keys {list(key.shape)} do not fit behind those in the cache, {list(room)}: "
            "[*B, T, K, H] and [*B, length, K, H]"
        )
    valid = None
    if is_concrete(index):
        if int(index) + new > length:
            raise ValueError(
                f"the cache has room for {length} tokens and holds {int(index)}: "
                f"{new} more do not fit"
            )
    else:
        valid = index + new <= length

    def written(cached: Array, part: Array) -> Array:
        part = part.astype(cached.dtype)
        at = (jnp.zeros((), index.dtype),) * (part.ndim - 3) + (index,)
        whole = jax.lax.dynamic_update_slice(cached, part, (*at, *(jnp.zeros_like(index),) * 2))
        return whole if valid is None else jnp.where(valid, whole, cached)

    key, value = written(cached_key.value, key), written(cached_value.value, value)
    if keep:
        cached_key.value, cached_value.value = key, value
        after = index + new
        cache_index.value = after if valid is None else jnp.where(valid, after, index)
    positions = {
        "query_positions": index + np.arange(new, dtype=np.int32),
        "key_positions": np.arange(length, dtype=np.int32),
    }
    return Step(key, value, masks.causal(), positions, valid)
