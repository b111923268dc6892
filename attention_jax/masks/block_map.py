"""Block maps: the kind of each block of the [T, S] plane.

    kind(i, j) = 0 skipped   every pair of the block is masked
                 1 partial   the mask is evaluated
                 2 full      every pair is visible

Static masks give a NumPy map while tracing; masks with data give a traced one. Neither costs more
than O(T + S) and one small number a block.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.checks import check_count
from attention_jax._core.numerics import is_concrete
from attention_jax._core.pytrees import Record, pytree, static
from attention_jax._core.term import Sides
from attention_jax.masks.view import Lengths, Verdict, View

SKIPPED, PARTIAL, FULL = 0, 1, 2
_SIGNS = "·▒█"
_PICTURE = 64  # rows and columns of the largest picture


@runtime_checkable
class Mask(Protocol):
    """The two methods of a mask; see `attention_jax.masks.mask`."""

    allowed: Callable[[View], Any]
    decide: Callable[[View, View], Verdict]


@pytree
class BlockMap(Record):
    """The kinds of all blocks.

    Attributes:
        kinds: int8 `[..., nT, nS]`: 0 skipped, 1 partial, 2 full.
        T: number of queries.
        S: number of keys.
        block_size: (query, key) size of a block; the last ones may be shorter.
    """

    kinds: Any
    T: int = static()
    S: int = static()
    block_size: tuple[int, int] = static()

    @property
    def visited(self) -> Any:
        """The number of visited blocks, including partial ones."""
        return (self.kinds != SKIPPED).sum()

    @property
    def partial(self) -> Any:
        """The number of partial blocks."""
        return (self.kinds == PARTIAL).sum()

    @property
    def skipped(self) -> Any:
        """The number of skipped blocks."""
        return (self.kinds == SKIPPED).sum()

    @property
    def density(self) -> Any:
        """The share of blocks that are visited, 0 for an empty plane."""
        size = int(np.prod(self.kinds.shape))
        return self.visited / size if size else 0.0

    def __repr__(self) -> str:
        """A picture: `·` skipped, `▒` partial, `█` full, queries down, keys across."""
        head = f"block_map(T={self.T}, S={self.S}, block_size={self.block_size})"
        if not is_concrete(self.kinds):
            return f"{head}: traced, {list(self.kinds.shape)}"
        kinds = np.asarray(self.kinds)
        if not kinds.size:
            return f"{head}: no blocks"
        lead = kinds.shape[:-2]
        plane = kinds.reshape(-1, *kinds.shape[-2:])[0]
        lines = ["".join(_SIGNS[kind] for kind in row) for row in _shrink(plane)]
        note = f", the first of {list(lead)}" if int(np.prod(lead)) > 1 else ""
        foot = (
            f"{int(self.visited)} of {kinds.size} blocks visited ({float(self.density):.1%}), "
            f"{int(self.partial)} of them partial"
        )
        return "\n".join([head + note, *lines, foot])


def _shrink(plane: np.ndarray) -> np.ndarray:
    """At most `_PICTURE` cells a side; a cell that joins blocks of several kinds is partial."""
    for axis in (0, 1):
        step = -(-plane.shape[axis] // _PICTURE)
        if step > 1:
            starts = np.arange(0, plane.shape[axis], step)
            low = np.minimum.reduceat(plane, starts, axis=axis)
            high = np.maximum.reduceat(plane, starts, axis=axis)
            plane = np.where(low == high, low, PARTIAL)
    return plane


def block_pair(block_size: Any) -> tuple[int, int]:
    """`block_size` as a pair (query, key), each at least 1."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an int or a pair (query, key), got {block_size!r}")
    query, key = (check_count("block_size", size, 1) for size in pair)
    return query, key


def block_map(
    mask: Mask, view: View, lengths: Lengths, block_size: int | tuple[int, int]
) -> BlockMap:
    """The block map of `mask` on a view of whole lengths; see `Mask.block_map`."""
    sizes = block_pair(block_size)
    counts = tuple(-(-n // size) for n, size in zip(lengths[:2], sizes, strict=True))
    if 0 in counts:
        return BlockMap(np.zeros(counts, np.int8), lengths.T, lengths.S, sizes)
    kinds = kinds_of(verdict(mask, view, sizes))
    xp = np if isinstance(kinds, np.ndarray) else jnp
    kinds = xp.broadcast_to(kinds, (*kinds.shape[:-2], *counts))
    return BlockMap(kinds, lengths.T, lengths.S, sizes)


def kinds_of(answer: Verdict) -> Any:
    """Converts a three-valued decision to int8 kinds; NumPy if it is known."""
    xp = jnp if any(isinstance(x, jax.Array) for x in answer) else np
    some, every = (xp.asarray(x) for x in answer)
    kinds = xp.where(every, np.int8(FULL), xp.where(some, np.int8(PARTIAL), np.int8(SKIPPED)))
    return kinds.reshape((1,) * max(0, 2 - kinds.ndim) + kinds.shape)


def verdict(mask: Mask, view: View, sizes: tuple[int, int]) -> Verdict:
    """The mask's three-valued decision for every block of `sizes` (query, key)."""

    def bounds(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
        low = high = x
        for axis in axes:
            size = sizes[axis + 2]
            low, high = _reduce(low, axis, size, "min"), _reduce(high, axis, size, "max")
        return low, high

    def split(tree: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(tree)
        pairs = [bounds(leaf, axes) for leaf in leaves]
        low, high = (jax.tree.unflatten(structure, [p[i] for p in pairs]) for i in (0, 1))
        return low, high

    query, key, pair = (
        split(side, axes) for side, axes in zip(view.sides, ((-2,), (-1,), (-2, -1)), strict=True)
    )
    rows, columns = split(view.query_positions, (-2,)), split(view.key_positions, (-1,))
    low, high = (View(Sides(query[i], key[i], pair[i]), rows[i], columns[i]) for i in (0, 1))
    return mask.decide(low, high)


def _reduce(x: Any, axis: int, size: int, kind: str) -> Any:
    """Minima or maxima of runs of `size` along `axis`; an axis of size 1 is kept."""
    length = x.shape[axis]
    if length == 1:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    pad = -length % size
    if pad:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, pad)
        x = xp.pad(x, widths, mode="edge")
    at = x.ndim + axis
    runs = x.reshape(*x.shape[:at], -1, size, *x.shape[at + 1 :])
    return getattr(runs, kind)(axis=at + 1)


def density(mask: Mask, view: View, lengths: Lengths, *, size: int = 1024) -> float:
    """The share of visible pairs: full blocks are counted, partial ones are evaluated."""
    T, S = lengths.T, lengths.S
    if T == 0 or S == 0:
        return 0.0
    kinds = np.asarray(block_map(mask, view, lengths, size).kinds)
    heights = np.minimum(size, T - size * np.arange(kinds.shape[-2]))
    widths = np.minimum(size, S - size * np.arange(kinds.shape[-1]))
    share = float(((kinds == FULL) * (heights[:, None] * widths / (T * S))).sum())
    planes = int(np.prod(kinds.shape[:-2]))
    some_partial = (kinds == PARTIAL).any(axis=tuple(range(kinds.ndim - 2)))
    for i, j in np.argwhere(some_partial):
        block = _cut(view, slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
        shape = (*kinds.shape[:-2], int(heights[i]), int(widths[j]))
        allowed = np.broadcast_to(np.asarray(mask.allowed(block)), shape)
        counted = allowed & (kinds[..., i, j] == PARTIAL)[..., None, None]
        share += float(counted.sum()) / (T * S)
    return share / planes


def _cut(view: View, rows: slice, columns: slice) -> View:
    """The slice of a view for one block; axes of size 1 are kept."""

    def cut(x: Any) -> Any:
        x = x if x.shape[-2] == 1 else x[..., rows, :]
        return x if x.shape[-1] == 1 else x[..., columns]

    return jax.tree.map(cut, view)
