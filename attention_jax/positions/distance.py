"""Lookup of biases by relative distance, for one block.

    block(t, s) = rows[t, column(key position s - query position t)]

A gather per pair would cost more than the rest of attention. A block of consecutive positions has
only Tb + Sb - 1 distances: its bias is a strip of that length, shifted by one from row to row.
Beyond some distance all columns are equal, so a block far from the diagonal has one value per row.
The case is chosen from the positions at run time: any positions are correct, and consecutive ones
are fast.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Shape
from attention_jax._core.batched_predicates import one_for_all
from attention_jax._core.numerics import is_concrete

Column = Callable[[Any], Any]

_reduced_over_batch = one_for_all(lambda flags: jnp.all(flags, axis=0))


def by_distance(
    rows: Array,
    query_positions: Array,
    key_positions: Array,
    column: Column,
    limits: tuple[int, int],
) -> Array:
    """`rows[t, column(distance)]` for one block, `[Tb, Sb]`.

    Args:
        rows: `[Tb, C]`, or `[1, C]` for equal rows.
        query_positions: ints `[Tb]`.
        key_positions: ints `[Sb]`.
        column: maps distances, ints of any shape, to columns.
        limits: (low, high): the column is constant for distances <= low and for distances >= high.
    """
    shape = (query_positions.shape[0], key_positions.shape[0])
    low, high = limits
    if 0 in shape:
        return jnp.zeros(shape, rows.dtype)

    def beyond(limit: int) -> Callable[[Array, Array], Array]:
        index = column(np.full((1,), limit, np.int32))
        return lambda rows, _: jnp.broadcast_to(_columns(rows, jnp.asarray(index)), shape)

    def strip(rows: Array) -> Array:
        distances = jnp.arange(sum(shape) - 1, dtype=jnp.int32)
        return _columns(rows, column(distances + (key_positions[0] - query_positions[-1])))

    def near(rows: Array, ready: Array | None) -> Array:
        return slide(strip(rows) if ready is None else ready, shape)

    def pairs(rows: Array, _: Array | None) -> Array:
        index = column(key_positions[None, :] - query_positions[:, None])
        if rows.shape[0] == 1:
            return _columns(rows, index.reshape(-1)).reshape(shape)
        return jnp.take_along_axis(rows, index, axis=1)

    flags = _flags(query_positions, key_positions, limits)
    cases = [jax.checkpoint(f) for f in (beyond(low), beyond(high), near, pairs)]
    # A strip shared by all rows is computed outside the branches: inside, XLA would fuse it with
    # its consumer and recompute it per pair. One strip per row is too expensive if unused.
    ready = strip(rows) if rows.shape[0] == 1 else None
    if isinstance(flags, np.ndarray):
        return cases[int(np.argmax([*flags, True]))](rows, ready)
    flags = _reduced_over_batch(flags)
    case = jnp.argmax(jnp.concatenate([flags, jnp.ones((1,), bool)]))
    return jax.lax.switch(case, cases, rows, ready)


def _flags(query_positions: Any, key_positions: Any, limits: tuple[int, int]) -> Any:
    """Flags: all distances <= low; all distances >= high; consecutive positions."""
    known = is_concrete(query_positions, key_positions)
    xp = np if known else jnp
    if known:
        query_positions, key_positions = np.asarray(query_positions), np.asarray(key_positions)
    least = key_positions.min() - query_positions.max()
    greatest = key_positions.max() - query_positions.min()
    steps = [x[1:] - x[:-1] == 1 for x in (query_positions, key_positions)]
    return xp.stack(
        [greatest <= limits[0], least >= limits[1], xp.all(steps[0]) & xp.all(steps[1])]
    )


def _columns(rows: Array, index: Array) -> Array:
    return jnp.take(rows, index, axis=1, mode="clip")


def slide(strip: Array, shape: Shape) -> Array:
    """`out[t, s] = strip[t, s + Tb - 1 - t]`: from `[#Tb, Tb + Sb - 1]` to `[Tb, Sb]`.

    One dynamic slice per row, which XLA copies as a whole; slicing and reshaping the strip instead
    is ten times slower on a CPU.
    """
    rows, columns = shape

    def window(row: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice(row, (at,), (columns,))

    at = jnp.arange(rows - 1, -1, -1, dtype=jnp.int32)
    if strip.shape[0] == 1:
        return jax.vmap(lambda at: window(strip[0], at))(at)
    return jax.vmap(window)(strip, at)
