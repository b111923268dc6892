"""Masks of positions: causal, window, local, prefix, block-diagonal, custom.

They compare absolute positions, by default 0..T-1 and 0..S-1. Except `custom`, they hold no arrays,
so their block maps are known at trace time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.checks import check_count
from attention_jax._core.numerics import arange
from attention_jax._core.pytrees import Bound, pytree, static
from attention_jax._core.term import Sides
from attention_jax.masks.mask import Band, Interval, Lengths, Mask, Verdict, View


@pytree
class Causal(Mask):
    """For a query at position p, keys at positions <= p."""

    align: str = static(default="start")

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "causal", {"align": None if self.align == "start" else self.align}

    def prepare(self, lengths: Lengths) -> Sides:
        """For "end", the offset S - T of each query's last visible key from its position."""
        if self.align == "start":
            return Sides()
        if not lengths.default_positions:
            raise ValueError(
                'causal(align="end") aligns the last query with the last key and cannot be '
                "combined with query_positions or key_positions; use causal() with true positions"
            )
        return Sides(query=arange(lengths.T) * 0 + (lengths.S - lengths.T))

    def _reach(self, view: View) -> Any:
        return view.query_positions + (0 if self.align == "start" else view.sides.query)

    def interval(self) -> Interval:
        """No key after the query; unbounded for align="end"."""
        return Interval(None, 0 if self.align == "start" else None)

    def band(self, lengths: Lengths) -> Band:
        """No key after the query, which for "end" is S - T positions later."""
        start = 0 if self.align == "start" else lengths.S - lengths.T
        return Band(None, start, start)

    def by_index(self) -> tuple[Mask, ...]:
        """None: it compares positions."""
        return ()

    def by_position(self) -> "Causal":
        """The last query is at the position of the last key."""
        return Causal()

    def allowed(self, view: View) -> Any:
        """`key position <= query position`."""
        return view.key_positions <= self._reach(view)

    def decide(self, low: View, high: View) -> Verdict:
        """From the corners of the block."""
        return Verdict(
            low.key_positions <= self._reach(high), high.key_positions <= self._reach(low)
        )


@pytree
class Window(Mask):
    """For a query at position p, keys at p - left .. p + right; None is no limit."""

    left: int | None = static()
    right: int | None = static()

    def __repr__(self) -> str:
        return f"window({self.left}, {self.right})"

    def interval(self) -> Interval:
        """The window."""
        return Interval(self.left, self.right)

    def band(self, lengths: Lengths) -> Band:
        """The window."""
        return Band(self.left, self.right)

    def allowed(self, view: View) -> Any:
        """`query position - left <= key position <= query position + right`."""
        low, high = self._reach(view.query_positions)
        keys = view.key_positions
        inside = keys == keys
        if low is not None:
            inside = inside & (keys >= low)
        return inside if high is None else inside & (keys <= high)

    def _reach(self, queries: Any) -> tuple[Any, Any]:
        """The first and the last visible key position of each query; None is no limit.

        Computed per row, and clamped so that the integers do not overflow.
        """
        xp, limits = jnp if isinstance(queries, jax.Array) else np, np.iinfo(queries.dtype)
        low = high = None
        if self.left is not None and self.left <= limits.max:
            low = xp.maximum(queries, limits.min + self.left) - self.left
        if self.right is not None and self.right <= limits.max:
            high = xp.minimum(queries, limits.max - self.right) + self.right
        return low, high

    def decide(self, low: View, high: View) -> Verdict:
        """From the limits of the first and of the last query in the block."""
        first, last = self._reach(low.query_positions), self._reach(high.query_positions)
        some = every = np.True_
        if first[0] is not None:
            some, every = high.key_positions >= first[0], low.key_positions >= last[0]
        if first[1] is not None:
            some = some & (low.key_positions <= last[1])
            every = every & (high.key_positions <= first[1])
        return Verdict(some, every)


@pytree
class Prefix(Mask):
    """Keys at positions below `length`, for every query."""

    length: int = static()

    def __repr__(self) -> str:
        return f"prefix({self.length})"

    def by_side(self, lengths: Lengths) -> Sides:
        """The first keys."""
        return Sides(key=arange(lengths.S) < self.length)

    def allowed(self, view: View) -> Any:
        """`key position < length`."""
        return view.key_positions < self.length

    def decide(self, low: View, high: View) -> Verdict:
        """From the range of key positions."""
        return Verdict(low.key_positions < self.length, high.key_positions < self.length)


@pytree
class BlockDiagonal(Mask):
    """Query and key are in the same run of `size` positions."""

    size: int = static()

    def __repr__(self) -> str:
        return f"block_diagonal({self.size})"

    def interval(self) -> Interval:
        """A run's length."""
        return Interval(self.size - 1, self.size - 1)

    def allowed(self, view: View) -> Any:
        """`query position // size == key position // size`."""
        return view.query_positions // self.size == view.key_positions // self.size

    def decide(self, low: View, high: View) -> Verdict:
        """From the runs that the ranges intersect."""
        q_low, q_high = low.query_positions // self.size, high.query_positions // self.size
        k_low, k_high = low.key_positions // self.size, high.key_positions // self.size
        overlap = (q_low <= k_high) & (k_low <= q_high)
        return Verdict(overlap, (q_low == k_high) & (k_low == q_high))


@pytree
class Custom(Mask):
    """A mask given as a function of positions."""

    function: Bound

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "custom", {"f": self.function.function}

    def per_head(self) -> "Custom":
        """Adds a head axis to the function's arrays, which all heads share."""
        return Custom(jax.tree.map(lambda x: jnp.asarray(x)[None], self.function))

    def allowed(self, view: View) -> Any:
        """Calls the function and checks what it returns."""
        allowed = self.function(view.query_positions, view.key_positions)
        if not hasattr(allowed, "dtype") or allowed.dtype != np.bool_:
            kind = getattr(allowed, "dtype", type(allowed).__name__)
            raise TypeError(f"masks.custom(f): f must return a boolean array, got {kind}")
        shape = jnp.broadcast_shapes(view.query_positions.shape, view.key_positions.shape)
        if jnp.broadcast_shapes(allowed.shape, shape) != shape:
            raise ValueError(
                f"masks.custom(f): f returned shape {list(allowed.shape)} for positions that "
                f"broadcast to {list(shape)}"
            )
        return allowed


def causal(align: str = "start") -> Mask:
    """The causal mask, `s <= t` on absolute positions.

    Args:
        align: "start": keys at positions <= t are visible to query t, as in jax.nn; "end": the last
            key is visible to the last query, `s <= t + S - T`, for default positions only.

    Returns:
        A mask object.

    Raises:
        ValueError: any other `align`.
    """
    if align not in ("start", "end"):
        raise ValueError(f'align must be "start" or "end", got {align!r}')
    return Causal(align)


def window(left: int | None, right: int | None) -> Mask:
    """The sliding window, `p - left <= s <= p + right` for a query at position p.

    Args:
        left: number of visible positions before the query's, at least 0; None is no limit.
        right: number of visible positions after it; None is no limit. With `window(255, 0)`
            256 keys are visible, the query's own included.

    Returns:
        A mask object.
    """
    left = left if left is None else check_count("left", left)
    return Window(left, right if right is None else check_count("right", right))


def local(size: int) -> Mask:
    """The symmetric window: `size // 2` keys on each side of the query's position, and its own.

    Args:
        size: window_size in the papers, at least 1.

    Returns:
        A mask object, `window(size // 2, size // 2)`.
    """
    half = check_count("size", size, 1) // 2
    return Window(half, half)


def prefix(length: int) -> Mask:
    """The prefix mask: keys at positions below `length`, for every query.

    `prefix(n) | causal()` is the mask of a prefix language model.

    Args:
        length: number of positions visible to every query.

    Returns:
        A mask object.

    References:
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning", arXiv:1910.10683, §3.2.1.
    """
    return Prefix(check_count("length", length))


def block_diagonal(size: int) -> Mask:
    """The block-diagonal mask: runs of `size` positions, `t // size == s // size`.

    Args:
        size: positions in a run, at least 1.

    Returns:
        A mask object.
    """
    return BlockDiagonal(check_count("size", size, 1))


def custom(f: Callable[[Any, Any], Any]) -> Mask:
    """A custom mask: a boolean function of positions.

    Args:
        f: `f(query_positions, key_positions) -> bool`, elementwise on broadcasting int arrays. A
            `jax.tree_util.Partial` carries arrays. No block is skipped, because blocks cannot be
            classified without evaluating f.

    Returns:
        A mask object.
    """
    if not callable(f):
        raise TypeError(f"masks.custom(f): f must be callable, got {type(f).__name__}")
    return Custom(Bound.of(f))
