"""Dropout of attention weights by a counter-based generator.

    keep(b, n, t, s) = hash(key, b, n, position of t, position of s) >= rate · 2³²

The mask is a function of these arguments alone. It is computed with each block and never stored, so
implementation, block size, rematerialisation and sharding do not change it.

Threefry gives 32 random bits per row and per column, O(T + S). An entry combines its row's and its
column's bits with the finaliser of MurmurHash3, a bijection in which every input bit affects every
output bit.

References:
    Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
    Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3" (counter-based generators).
"""

import math
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from attention_jax._core.axes import Layout
from attention_jax._core.term import Sides


def row_and_column_bits(
    key: Any, layout: Layout, query_positions: Any, key_positions: Any, *, shared: bool = False
) -> Sides:
    """32 random bits per (batch, head, query position) and per key position.

    Args:
        key: a PRNG key, typed or raw.
        layout: the sizes of the problem.
        query_positions: ints `[*#B, 1, T]`.
        key_positions: ints `[*#B, 1, S]`.
        shared: one mask for all batches and heads.

    Returns:
        Query leaf `[*#B, #N, T]` and key leaf `[*#B, 1, S]`, uint32.
    """
    sizes = (*layout.batch, layout.N)
    if shared:
        sizes = (1,) * len(sizes)
    streams = jnp.arange(math.prod(sizes), dtype=jnp.uint32).reshape(*sizes, 1)
    words = jax.random.bits(key, (2, 2), jnp.uint32)
    return Sides(
        query=_bits(words[0], streams, query_positions),
        key=_bits(words[1], jnp.zeros((1,) * streams.ndim, jnp.uint32), key_positions),
    )


def _bits(words: Array, streams: Array, positions: Any) -> Array:
    """Threefry of each (stream, position) under the key `words [2]`."""
    positions = jnp.asarray(positions).astype(jnp.uint32)
    shape = jnp.broadcast_shapes(streams.shape, positions.shape)
    counters = [jnp.broadcast_to(x, shape).ravel() for x in (streams, positions)]
    both = jax.extend.random.threefry_2x32(words, jnp.concatenate(counters))
    return both[: counters[0].size].reshape(shape)


def keep(
    row_bits: UInt32[Array, " Tb"], column_bits: UInt32[Array, " Sb"], rate: float | int
) -> Bool[Array, "Tb Sb"]:
    """The dropout mask of one block of one head: True, with probability `1 - rate`, to keep."""
    x = row_bits[:, None] ^ column_bits[None, :]
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    x = x ^ (x >> 16)
    return x >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
