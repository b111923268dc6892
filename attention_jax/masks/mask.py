"""The base class of masks, and their algebra.

    mask(t, s) = True where query t may attend to key s

A mask has two methods: `allowed` returns the entries of a block, and `decide` returns, from the
ranges of the block's data, whether it is empty, full or partial. The second is three-valued logic,
so `&`, `|` and `~` compose both. A new mask is one class with these two methods; the others have
correct defaults, which only restrict its use in vendors' kernels, sub-quadratic attention and
rolling caches.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import AnyArray, Array, Size
from attention_jax._core.checks import check_known, check_positions, check_size
from attention_jax._core.numerics import arange
from attention_jax._core.pytrees import Record, pytree
from attention_jax._core.term import Sides
from attention_jax.masks import block_map as blocks
from attention_jax.masks.view import (
    Band,
    Interval,
    Lengths,
    SegmentIds,
    SequenceLengths,
    Verdict,
    View,
    spread,
    whole_view,
)


class Mask(Record):
    """A boolean function of pairs. Subclasses are frozen dataclasses registered as pytrees."""

    def prepare(self, lengths: Lengths) -> Sides:
        """Data by side: query leaves `[*#B, #N, T]`, key leaves `[*#B, #N, S]`, pairs both."""
        return Sides()

    def per_head(self) -> "Mask":
        """The mask inside a kernel, each leaf with a leading head axis of size 1 or N.

        The data that `prepare` returns are removed.
        """
        return self

    def allowed(self, view: View) -> Any:
        """Which pairs may attend, broadcastable to `[..., T, S]`."""
        raise NotImplementedError(f"{type(self).__name__} has no allowed")

    def decide(self, low: View, high: View) -> Verdict:
        """Whether blocks are empty or full, from the minima and maxima of their data."""
        return Verdict(True, False)

    def overflowed(self) -> Any:
        """The examples whose cache overflowed, bool `[*#B, 1, 1]`: outputs are NaN."""
        return None

    def conjuncts(self) -> "tuple[Mask, ...]":
        """The masks of which this one is the conjunction."""
        return (self,)

    def interval(self) -> Interval:
        """The positions of visible keys, relative to the query's."""
        return Interval(None, None)

    def band(self, lengths: Lengths) -> Band | None:
        """The mask as an interval of array indices, if it is one at default positions."""
        return None

    def by_side(self, lengths: Lengths) -> Sides | None:
        """The mask as a conjunction of flags of queries and of keys, if it is one; `()` is all."""
        return None

    def sequence_lengths(self) -> SequenceLengths | None:
        """The lengths, if the mask is one of padding."""
        return None

    def segment_ids(self) -> SegmentIds | None:
        """The ids, if the mask is one of packed sequences."""
        return None

    def take_heads(self, heads: Sequence[int], count: int) -> "Mask":
        """The mask of some of `count` heads."""
        return self

    def latest(self) -> int | None:
        """The length of a rolling cache, if this is its mask."""
        return None

    def by_position(self) -> "Mask":
        """The mask for keys of a cache: compares positions in place of array indices."""
        return self

    def by_index(self) -> "tuple[Mask, ...]":
        """The parts that depend on a key's array index: by default, masks with data."""
        return () if type(self).prepare is Mask.prepare else (self,)

    def __and__(self, other: object) -> "Mask":
        """The conjunction."""
        return And(self, other) if _is_mask(other, "&") else NotImplemented

    def __or__(self, other: object) -> "Mask":
        """The disjunction."""
        return Or(self, other) if _is_mask(other, "|") else NotImplemented

    # NumPy defers to these operators, whose error names from_array.
    __array_ufunc__ = None
    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "Mask":
        """The complement."""
        return Not(self)

    def __bool__(self) -> bool:
        """Raises: `and` / `or` / `not` would return one of the masks."""
        raise TypeError("combine masks with & | ~, not with and / or / not")

    def to_array(
        self,
        T: Size,
        S: Size,
        *,
        query_positions: AnyArray | None = None,
        key_positions: AnyArray | None = None,
    ) -> Array:
        """The mask as a bool array, `[T, S]` or with its own batch and head axes in front.

        Args:
            T: number of queries.
            S: number of keys.
            query_positions: ints `[T]` or `[*B, T]`; 0..T-1 by default.
            key_positions: ints `[S]` or `[*B, S]`; 0..S-1 by default.

        Returns:
            bool, `[T, S]`, `[*B, 1, T, S]` or `[*B, N, T, S]`.
        """
        view, _ = self._view(T, S, query_positions, key_positions)
        allowed = jnp.asarray(self.allowed(view), bool)
        lead = allowed.shape[:-2]
        return jnp.broadcast_to(allowed, (*lead, T, S))

    def _view(
        self, T: Size, S: Size, query_positions: Any = None, key_positions: Any = None
    ) -> tuple[View, Lengths]:
        T, S = check_size("T", T), check_size("S", S)
        lengths = Lengths(T, S, query_positions is None and key_positions is None)
        rows = _positions("query_positions", query_positions, T)
        columns = _positions("key_positions", key_positions, S)
        return whole_view(self.prepare(lengths), rows, columns), lengths

    def block_map(
        self,
        T: Size,
        S: Size,
        block_size: int | tuple[int, int],
        *,
        query_positions: AnyArray | None = None,
        key_positions: AnyArray | None = None,
    ) -> blocks.BlockMap:
        """The block map of the `[T, S]` plane; its repr is a picture.

        Args:
            T: number of queries.
            S: number of keys.
            block_size: an int, or a pair (query, key).
            query_positions: ints `[T]` or `[*B, T]`; 0..T-1 by default.
            key_positions: ints `[S]` or `[*B, S]`; 0..S-1 by default.

        Returns:
            A `BlockMap`; its `kinds` are int8 `[..., nT, nS]`: 0 skipped, 1 partial, 2 full.
        """
        check_known("block_map", T=T, S=S)
        view, lengths = self._view(T, S, query_positions, key_positions)
        return blocks.block_map(self, view, lengths, block_size)

    def density(self, T: Size, S: Size) -> float:
        """The share of visible pairs of the `[T, S]` plane; evaluates partial blocks only."""
        check_known("density", T=T, S=S)
        view, lengths = self._view(T, S)
        return blocks.density(self, view, lengths)


def _positions(name: str, positions: Any, length: Any) -> Any:
    if positions is None:
        return arange(length)
    check_positions(name, positions, np.shape(positions)[:-1], length)
    return positions.astype(np.int32)


def _child(view: View, index: int) -> View:
    sides = Sides(*(side[index] for side in view.sides))
    return view._replace(sides=sides)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Pair(Mask):
    """Two masks, combined."""

    first: Mask
    second: Mask

    def prepare(self, lengths: Lengths) -> Sides:
        """Both masks' data, side by side."""
        both = zip(self.first.prepare(lengths), self.second.prepare(lengths), strict=True)
        return Sides(*both)

    def per_head(self) -> "Pair":
        """Both masks for one head."""
        return type(self)(self.first.per_head(), self.second.per_head())

    def overflowed(self) -> Any:
        """The overflow flags of either mask."""
        first, second = self.first.overflowed(), self.second.overflowed()
        if first is None or second is None:
            return second if first is None else first
        return first | second

    def take_heads(self, heads: Sequence[int], count: int) -> "Pair":
        """Both masks of these heads."""
        parts = (mask.take_heads(heads, count) for mask in (self.first, self.second))
        return type(self)(*parts)

    def by_position(self) -> "Pair":
        """Both masks by position."""
        return type(self)(self.first.by_position(), self.second.by_position())

    def by_index(self) -> tuple[Mask, ...]:
        """Those of both."""
        return (*self.first.by_index(), *self.second.by_index())

    def _verdicts(self, low: View, high: View) -> tuple[Verdict, Verdict]:
        return (
            self.first.decide(_child(low, 0), _child(high, 0)),
            self.second.decide(_child(low, 1), _child(high, 1)),
        )

    def _show(self, sign: str) -> str:
        def part(mask: Mask) -> str:
            nested = isinstance(mask, Pair) and type(mask) is not type(self)
            return f"({mask!r})" if nested else repr(mask)

        return f"{part(self.first)} {sign} {part(self.second)}"


def _is_mask(other: object, operator: str) -> TypeGuard[Mask]:
    """Whether `other` is a mask; a TypeError for an array."""
    if hasattr(other, "dtype"):
        raise TypeError(f"{operator} joins mask objects, not arrays: write masks.from_array(array)")
    return isinstance(other, Mask)


@pytree
class And(Pair):
    """`first & second`."""

    def __repr__(self) -> str:
        """The expression."""
        return self._show("&")

    def conjuncts(self) -> tuple[Mask, ...]:
        """Those of both."""
        return (*self.first.conjuncts(), *self.second.conjuncts())

    def interval(self) -> Interval:
        """The intersection."""
        return intersection(self.first, self.second)

    def allowed(self, view: View) -> Any:
        """Both."""
        return self.first.allowed(_child(view, 0)) & self.second.allowed(_child(view, 1))

    def decide(self, low: View, high: View) -> Verdict:
        """None if either has none; all if both have all."""
        a, b = self._verdicts(low, high)
        return Verdict(a.some & b.some, a.every & b.every)


@pytree
class Or(Pair):
    """`first | second`."""

    def __repr__(self) -> str:
        """The expression."""
        return self._show("|")

    def interval(self) -> Interval:
        """The union's hull."""
        sides = zip(self.first.interval(), self.second.interval(), strict=True)
        return Interval(*(None if a is None or b is None else max(a, b) for a, b in sides))

    def allowed(self, view: View) -> Any:
        """Either."""
        return self.first.allowed(_child(view, 0)) | self.second.allowed(_child(view, 1))

    def decide(self, low: View, high: View) -> Verdict:
        """None if both have none; all if either has all."""
        a, b = self._verdicts(low, high)
        return Verdict(a.some | b.some, a.every | b.every)


@pytree
class Not(Mask):
    """`~mask`."""

    mask: Mask

    def __repr__(self) -> str:
        """The expression."""
        return f"~({self.mask!r})" if isinstance(self.mask, Pair) else f"~{self.mask!r}"

    def prepare(self, lengths: Lengths) -> Sides:
        """As the inner mask."""
        return self.mask.prepare(lengths)

    def per_head(self) -> "Not":
        """The inner mask for one head."""
        return Not(self.mask.per_head())

    def overflowed(self) -> Any:
        """As the inner mask."""
        return self.mask.overflowed()

    def take_heads(self, heads: Sequence[int], count: int) -> "Not":
        """The inner mask of these heads."""
        return Not(self.mask.take_heads(heads, count))

    def by_position(self) -> "Not":
        """The inner mask by position."""
        return Not(self.mask.by_position())

    def by_index(self) -> tuple[Mask, ...]:
        """As the inner mask."""
        return self.mask.by_index()

    def allowed(self, view: View) -> Any:
        """The complement."""
        return self.mask.allowed(view) ^ True

    def decide(self, low: View, high: View) -> Verdict:
        """Some unless the inner mask has all; all if it has none."""
        some, every = self.mask.decide(low, high)
        return Verdict(every ^ True, some ^ True)


def intersection(*masks: Mask) -> Interval:
    """The interval of visible keys under all the masks at once."""
    sides = zip(Interval(None, None), *(mask.interval() for mask in masks), strict=True)
    return Interval(*(min((x for x in side if x is not None), default=None) for side in sides))


__all__ = [
    "And",
    "Band",
    "Interval",
    "Lengths",
    "Mask",
    "Not",
    "Or",
    "SegmentIds",
    "SequenceLengths",
    "Sides",
    "Verdict",
    "View",
    "spread",
]
