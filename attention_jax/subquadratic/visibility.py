"""Masks of sub-quadratic attention: causal order and padding.

    key s is visible to query t  if  s <= t + offset,  key s is unmasked,  and query t is unmasked

A method that sums keys before they are combined with queries cannot mask a key for one query only.
A mask is therefore decomposed into a mask of keys, a mask of queries, and causal order; any other
mask raises an error.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import as_array, check_pairs
from attention_jax.masks.data import from_array
from attention_jax.masks.mask import Lengths, Mask


class Visibility(NamedTuple):
    """A mask decomposed into keys, queries and order.

    Attributes:
        key: bool `[B, 1 or N, S]`, the mask of keys; None is all.
        query: bool `[B, 1 or N, T]`, the mask of queries; None is all.
        offset: keys s <= t + offset are visible to query t; None is no order.
        start: the position of query 0 relative to key 0.
    """

    key: Array | None
    query: Array | None
    offset: int | None
    start: int


def mask_object(mask: Any) -> Mask | None:
    """Converts the argument `mask` to a mask object."""
    return mask if mask is None or isinstance(mask, Mask) else from_array(as_array("mask", mask))


def visibility(name: str, mask: Mask | None, layout: Layout) -> Visibility:
    """Decomposes a mask for the function `name`.

    Args:
        name: the public function, for error messages.
        mask: a mask object or None.
        layout: the sizes of the problem.

    Raises:
        ValueError: a mask other than causal order and padding, or of the wrong shape.
    """
    lengths = Lengths(layout.T, layout.S, lead=(*layout.batch, layout.N))
    keys, queries, offsets, start = [], [], [], 0
    for part in () if mask is None else mask.conjuncts():
        if (flags := part.by_side(lengths)) is not None:
            keys += [] if isinstance(flags.key, tuple) else [flags.key]
            queries += [] if isinstance(flags.query, tuple) else [flags.query]
        elif (band := part.band(lengths)) is not None and band.left is None:
            offsets += [] if band.right is None else [band.right]
            start = band.start or start
        else:
            raise ValueError(
                f"{name} supports only masks of causal order and padding, got {part!r}: use "
                "causal(), padding(...), prefix(n), a bool array [*B, N, 1, S] of keys or "
                "[*B, N, T, 1] of queries, or several of them joined by &; attend supports "
                "any mask"
            )
    key = _flags(keys, layout, layout.S, pair_axis=-2)
    query = _flags(queries, layout, layout.T, pair_axis=-1)
    return Visibility(key, query, min(offsets, default=None), start)


def _flags(given: list[Any], layout: Layout, length: int, *, pair_axis: int) -> Array | None:
    """The conjunction of masks, `[B, 1 or N, length]`; `pair_axis` is their axis of size 1."""
    together = None
    for flags in given:
        check_pairs("mask", jnp.expand_dims(flags, pair_axis), layout)
        rank = len(layout.batch) + 2
        flags = jnp.asarray(flags).reshape((1,) * (rank - flags.ndim) + flags.shape)
        heads = flags.shape[-2]
        flags = jnp.broadcast_to(flags, (*layout.batch, heads, length))
        flags = flags.reshape(math.prod(layout.batch), heads, length)
        together = flags if together is None else together & flags
    return together
