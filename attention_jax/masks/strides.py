"""Periodic masks of positions: dilated, strided, summary tokens, axial.

    strided    (p - s) mod stride = 0
    dilated    (p - s) mod dilation = 0, within a window
    summary    s mod size >= size - count
    axial      all grid coordinates but one are equal

They hold no arrays, so their block maps are known at trace time. For blocks of consecutive
positions the classification (empty, partial, full) is exact.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.checks import check_count
from attention_jax._core.pytrees import pytree, static
from attention_jax.masks.mask import Interval, Mask, Verdict, View


def _distances(low: View, high: View) -> tuple[Any, Any]:
    """The smallest and largest `key position - query position` of each block."""
    return (
        low.key_positions - high.query_positions,
        high.key_positions - low.query_positions,
    )


def _congruent(view: View, step: int) -> Any:
    """Whether a distance is a multiple of `step`, from one remainder per row and per column."""
    return view.query_positions % step == view.key_positions % step


def _single_pair(low: View, high: View) -> Any:
    """Whether all queries of a block have the same position, and all keys too."""
    return (low.query_positions == high.query_positions) & (low.key_positions == high.key_positions)


def _multiple_between(least: Any, greatest: Any, step: int) -> Any:
    """Whether a multiple of `step` lies in [least, greatest]."""
    return greatest // step * step >= least


@pytree
class Strided(Mask):
    """Distances that are multiples of `stride`."""

    stride: int = static()

    def __repr__(self) -> str:
        return f"strided({self.stride})"

    def allowed(self, view: View) -> Any:
        """`distance mod stride == 0`."""
        return _congruent(view, self.stride)

    def decide(self, low: View, high: View) -> Verdict:
        """From the multiples of the stride in the block's range of distances."""
        some = _multiple_between(*_distances(low, high), self.stride)
        return Verdict(some, some & (_single_pair(low, high) | (self.stride == 1)))


@pytree
class Dilated(Mask):
    """Distances `j · dilation` with |j| at most `half`."""

    size: int = static()
    dilation: int = static()

    def __repr__(self) -> str:
        return f"dilated({self.size}, {self.dilation})"

    @property
    def _reach(self) -> int:
        return self.size // 2 * self.dilation

    def interval(self) -> Interval:
        """The window."""
        return Interval(self._reach, self._reach)

    def allowed(self, view: View) -> Any:
        """Within the window, at a multiple of the dilation."""
        distance = view.key_positions - view.query_positions
        near = abs(distance) <= self._reach
        return near if self.dilation == 1 else near & _congruent(view, self.dilation)

    def decide(self, low: View, high: View) -> Verdict:
        """From the multiples of the dilation among the distances within the window."""
        least, greatest = _distances(low, high)
        xp = jnp if isinstance(least, jax.Array) else np
        some = _multiple_between(
            xp.maximum(least, -self._reach), xp.minimum(greatest, self._reach), self.dilation
        )
        inside = (least >= -self._reach) & (greatest <= self._reach)
        return Verdict(some, some & inside & (_single_pair(low, high) | (self.dilation == 1)))


@pytree
class Summary(Mask):
    """The last `count` keys of every run of `size` positions."""

    size: int = static()
    count: int = static()

    def __repr__(self) -> str:
        return f"summary_tokens({self.size}, {self.count})"

    def allowed(self, view: View) -> Any:
        """`key position mod size >= size - count`."""
        return view.key_positions % self.size >= self.size - self.count

    def _count_below(self, position: Any) -> Any:
        """Number of summary positions in `[0, position)`."""
        rest = position % self.size - (self.size - self.count)
        return position // self.size * self.count + rest.clip(0)

    def decide(self, low: View, high: View) -> Verdict:
        """From the number of summary positions in the range of keys."""
        first, last = low.key_positions, high.key_positions
        found = self._count_below(last + 1) - self._count_below(first)
        return Verdict(found > 0, found == last - first + 1)


@pytree
class Axial(Mask):
    """Cells of a row-major grid that differ in the coordinate of one axis only."""

    shape: tuple[int, ...] = static()
    axis: int = static()

    def __repr__(self) -> str:
        return f"axial({self.shape}, {self.axis})"

    @property
    def _steps(self) -> tuple[int, int]:
        """Stride of the axis, and size of a slab (all positions with equal outer indices)."""
        step = math.prod(self.shape[self.axis + 1 :])
        return step, step * self.shape[self.axis]

    def interval(self) -> Interval:
        """From one end of a line to the other."""
        step, slab = self._steps
        return Interval(slab - step, slab - step)

    def allowed(self, view: View) -> Any:
        """The same slab, and the same inner coordinates."""
        step, slab = self._steps
        query, key = view.query_positions, view.key_positions
        return (query // slab == key // slab) & _congruent(view, step)

    def decide(self, low: View, high: View) -> Verdict:
        """From the slab that both ranges intersect; two common slabs contain a visible pair."""
        step, slab = self._steps
        xp = jnp if isinstance(low.query_positions - low.key_positions, jax.Array) else np
        (q_low, q_high), (k_low, k_high) = ranges = (
            (low.query_positions, high.query_positions),
            (low.key_positions, high.key_positions),
        )
        first = xp.maximum(q_low // slab, k_low // slab)
        last = xp.minimum(q_high // slab, k_high // slab)
        (a, b), (c, d) = (
            (xp.maximum(x, first * slab), xp.minimum(y, first * slab + slab - 1)) for x, y in ranges
        )
        some = (first < last) | ((first == last) & _multiple_between(c - b, d - a, step))
        one_slab = (q_low // slab == k_high // slab) & (k_low // slab == q_high // slab)
        return Verdict(some, some & one_slab & (_single_pair(low, high) | (step == 1)))


def strided(stride: int) -> Mask:
    """Strided mask: keys at distances that are multiples of `stride`, `(p - s) mod stride = 0`.

    Keys before and after the query are visible. One of the two factors of the Sparse Transformer's
    strided pattern, `sparse_strided`.

    Args:
        stride: l in the paper, at least 1; with 1 every key is visible.

    Returns:
        A mask object.

    Example:
        >>> strided(3).to_array(1, 7)[0].astype(int).tolist()
        [1, 0, 0, 1, 0, 0, 1]

    References:
        Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509,
        §4.3, A^(2) of "strided attention".
    """
    return Strided(check_count("stride", stride, 1))


def dilated(size: int, dilation: int) -> Mask:
    """Dilated sliding window: keys at `p + j · dilation` for |j| <= size // 2.

    Args:
        size: as in `local`: `size // 2` keys on each side, and the query's own position.
        dilation: distance between neighbouring visible keys, at least 1; 1 is `local(size)`.

    Returns:
        A mask object.

    Example:
        >>> dilated(3, 2).to_array(5, 5)[2].astype(int).tolist()
        [1, 0, 1, 0, 1]

    References:
        Beltagy, Peters, Cohan 2020, "Longformer", arXiv:2004.05150, §3.1, "Dilated Sliding Window".
    """
    return Dilated(check_count("size", size, 1), check_count("dilation", dilation, 1))


def summary_tokens(size: int, count: int = 1) -> Mask:
    """Summary columns: the last `count` keys of every run of `size`, `s mod size >= size - count`.

    One of the two factors of the Sparse Transformer's fixed pattern, `sparse_fixed`.

    Args:
        size: l in the paper, at least 1.
        count: c in the paper, 1 to `size`.

    Returns:
        A mask object.

    References:
        Child et al. 2019, arXiv:1904.10509, §4.3, A^(2) of "fixed attention".
    """
    size, count = check_count("size", size, 1), check_count("count", count, 1)
    if count > size:
        raise ValueError(f"count must be at most size, got count {count} and size {size}")
    return Summary(size, count)


def axial(shape: Sequence[int], axis: int) -> Mask:
    """Axial mask: attention along one axis of a grid; all other coordinates are equal.

    Position p is a cell of an n-d grid in row-major order, as in `reshape`. Positions beyond the
    grid belong to further grids of the same shape; no pair of two different grids is visible.
    `attention_jax.axial_attention` computes the same by reshaping.

    Args:
        shape: the grid's sizes, each at least 1.
        axis: the axis of attention; negative values count from the last axis.

    Returns:
        A mask object.

    Raises:
        ValueError: the axis is out of range.

    Example:
        >>> axial((2, 3), 0).to_array(6, 6)[1].astype(int).tolist()
        [0, 1, 0, 0, 1, 0]

    References:
        Ho et al. 2019, "Axial Attention in Multidimensional Transformers", arXiv:1912.12180, §3.
    """
    sizes, at = check_grid(shape, axis)
    return Axial(sizes, at)


def check_grid(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], int]:
    """The grid's sizes as ints, and the axis as a non-negative index."""
    sizes = tuple(check_count("shape", size, 1) for size in shape)
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an integer, got {type(axis).__name__}")
    if not -len(sizes) <= axis < len(sizes):
        raise ValueError(f"axis {axis} is out of range for a grid of shape {list(sizes)}")
    return sizes, int(axis) % len(sizes)
