"""Masks of data: lengths, segment ids, arrays. They use array indices.

Their data is O(T + S), or the given array; block maps are traced, through block minima and maxima.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import AnyArray, Shape
from attention_jax._core.checks import as_array, fits_int32
from attention_jax._core.numerics import arange
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides
from attention_jax.masks.mask import Lengths, Mask, SegmentIds, SequenceLengths, Verdict, View


def _check_ids(name: str, ids: Any) -> None:
    as_array(name, ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {np.dtype(ids.dtype).name}")


def _limits(lengths: Any) -> Any:
    """Lengths `[*B]` as int32 `[*B, 1, 1]`."""
    xp = np if isinstance(lengths, (int, np.integer, np.ndarray)) else jnp
    lengths = xp.asarray(lengths)
    if lengths.dtype.itemsize > 2:  # larger values exceed every index
        lengths = xp.clip(lengths, 0, np.iinfo(np.int32).max)
    return lengths.astype(np.int32)[..., None, None]


def _row(x: Any, like: Any) -> Any:
    """A vector as a row with the rank of `like`."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


@pytree
class Padding(Mask):
    """The first `key_lengths` keys, for the first `query_lengths` queries.

    Lengths are compared with array indices, or with positions.
    """

    key_lengths: Any
    query_lengths: Any = None
    positional: bool = static(default=False)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "padding", {"key_lengths": self.key_lengths, "query_lengths": self.query_lengths}

    def _side(self, lengths: Any, size: Any) -> Any:
        """Flags by index; by position the lengths themselves, since positions are in the view."""
        lengths = _limits(lengths)
        index = _row(arange(size), lengths)
        return lengths + 0 * index if self.positional else index < lengths

    def prepare(self, lengths: Lengths) -> Sides:
        """One entry for each key and, with `query_lengths`, for each query."""
        query = () if self.query_lengths is None else self._side(self.query_lengths, lengths.T)
        return Sides(query=query, key=self._side(self.key_lengths, lengths.S))

    def by_side(self, lengths: Lengths) -> Sides | None:
        """The flags by array index."""
        return None if self.positional else self.prepare(lengths)

    def sequence_lengths(self) -> SequenceLengths | None:
        """The lengths by array index."""
        return None if self.positional else SequenceLengths(self.key_lengths, self.query_lengths)

    def per_head(self) -> "Padding":
        """The entries are in the sides."""
        return Padding(None, None, self.positional)

    def by_position(self) -> "Padding":
        """Keys at positions below their length."""
        return Padding(self.key_lengths, self.query_lengths, True)

    def by_index(self) -> tuple[Mask, ...]:
        """Itself, unless it compares positions."""
        return () if self.positional else (self,)

    def allowed(self, view: View) -> Any:
        """Real key, real query."""
        return self._real(view, view)

    def _real(self, at: View, limits: View) -> Any:
        keys, queries = limits.sides.key, limits.sides.query
        if self.positional:
            keys = at.key_positions < keys
        if isinstance(queries, tuple):  # no query_lengths
            return keys
        return keys & (at.query_positions < queries if self.positional else queries)

    def decide(self, low: View, high: View) -> Verdict:
        """From the minimum position and maximum length, and vice versa."""
        return Verdict(self._real(low, high), self._real(high, low))


@pytree
class Segments(Mask):
    """Pairs with equal ids, other than the id of padding."""

    query_ids: Any
    key_ids: Any = None
    padding_id: int | None = static(default=None)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "segments", {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def prepare(self, lengths: Lengths) -> Sides:
        """The ids of both sides."""
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        for name, letter, ids, size in (
            ("query_ids", "T", self.query_ids, lengths.T),
            ("key_ids", "S", key_ids, lengths.S),
        ):
            if ids.shape[-1] != size:
                raise ValueError(
                    f"{name} has length {ids.shape[-1]} but {letter} = {size}"
                    + (" (give key_ids where T and S differ)" if self.key_ids is None else "")
                )
        return Sides(*map(_head, _alike(self.query_ids, key_ids)))

    def segment_ids(self) -> SegmentIds:
        """The ids."""
        return SegmentIds(self.query_ids, self.key_ids, self.padding_id)

    def per_head(self) -> "Segments":
        """The ids are in the sides."""
        return Segments(None, None, self.padding_id)

    def allowed(self, view: View) -> Any:
        """Equal ids."""
        same = view.sides.query == view.sides.key
        padding = self._padding(view)
        return same if padding is None else same & (view.sides.key != padding)

    def _padding(self, view: View) -> Any:
        """The padding id in the ids' dtype; None if that cannot represent it."""
        dtype = np.dtype(view.sides.key.dtype)
        limits = np.iinfo(dtype)
        fits = self.padding_id is not None and limits.min <= self.padding_id <= limits.max
        return dtype.type(self.padding_id) if fits else None

    def decide(self, low: View, high: View) -> Verdict:
        """From the ranges of ids; exact for blocks of one id, conservative for others."""
        q_low, q_high = low.sides.query, high.sides.query
        k_low, k_high = low.sides.key, high.sides.key
        some = (q_low <= k_high) & (k_low <= q_high)
        every = (q_low == k_high) & (k_low == q_high)
        padding = self._padding(low)
        if padding is not None:
            some = some & ~((k_low == padding) & (k_high == padding))
            every = every & (k_low != padding)
        return Verdict(some, every)


def _alike(query_ids: Any, key_ids: Any) -> tuple[Any, Any]:
    """Both with one dtype, int32 unless 64 bits are on.

    With one signed and one unsigned dtype, ids that the other cannot represent become -1 or -2,
    which match nothing.
    """
    widest = np.promote_types(query_ids.dtype, key_ids.dtype)
    dtype = jax.dtypes.canonicalize_dtype(widest if widest.kind in "iu" else np.int64)
    signed = [np.dtype(x.dtype).kind == "i" for x in (query_ids, key_ids)]
    if signed[0] == signed[1] or max(query_ids.dtype.itemsize, key_ids.dtype.itemsize) < 4:
        return query_ids.astype(dtype), key_ids.astype(dtype)

    def common(ids: Any, is_signed: bool) -> Any:
        xp = np if isinstance(ids, np.ndarray) else jnp
        new = ids.astype(dtype)
        return xp.where(new < 0, new.dtype.type(-2 if is_signed else -1), new)

    return common(query_ids, signed[0]), common(key_ids, signed[1])


def _head(ids: Any) -> Any:
    return ids if ids.ndim == 1 else ids[..., None, :]


@pytree
class FromArray(Mask):
    """A bool array, `[*#B, #N, #T, #S]`."""

    array: Any

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "from_array", {"array": self.array}

    def prepare(self, lengths: Lengths) -> Sides:
        """The array, whose last axes must be 1 or T and 1 or S."""
        T, S = self.array.shape[-2:]
        if T not in (1, lengths.T) or S not in (1, lengths.S):
            raise ValueError(
                f"mask has shape {list(self.array.shape)}, which does not broadcast to "
                f"[..., T, S] = [..., {lengths.T}, {lengths.S}]"
            )
        _check_one_reading(tuple(self.array.shape), lengths.lead)
        return Sides(pair=self.array)

    def by_index(self) -> tuple[Mask, ...]:
        """The mask itself, unless it broadcasts over keys."""
        return () if self.array.shape[-1] == 1 else (self,)

    def by_side(self, lengths: Lengths) -> Sides | None:
        """The array, if it broadcasts over queries or keys."""
        array = self.prepare(lengths).pair
        if array.shape[-2] == 1:
            return Sides(key=array[..., 0, :])
        return Sides(query=array[..., 0]) if array.shape[-1] == 1 else None

    def take_heads(self, heads: Sequence[int], count: int) -> "FromArray":
        """The planes of these heads, if they differ between heads."""
        if self.array.ndim < 3 or self.array.shape[-3] != count:
            return self
        return FromArray(self.array[..., np.asarray(heads), :, :])

    def per_head(self) -> "FromArray":
        """The entries are in the sides."""
        return FromArray(None)

    def allowed(self, view: View) -> Any:
        """The array's entries."""
        return view.sides.pair

    def decide(self, low: View, high: View) -> Verdict:
        """Any and all of the block's entries."""
        return Verdict(high.sides.pair, low.sides.pair)


def _check_one_reading(shape: Shape, lead: Shape) -> None:
    """Raises if the first of three axes may be the batch or the heads, `lead = (B, N)`."""
    if len(shape) == 3 and len(lead) == 2 and shape[0] > 1 and lead[0] == lead[1] == shape[0]:
        raise ValueError(
            f"mask has shape {list(shape)}, whose first axis fits both B = {lead[0]} and "
            f"N = {lead[1]}: write mask[:, None] for a mask of each example, or mask[None] for a "
            "mask of each head"
        )


def padding(key_lengths: Any, query_lengths: Any = None) -> Mask:
    """Masks padding at the end: key s is real where `s < key_lengths`.

    Args:
        key_lengths: ints `[*B]`: the number of real keys of each example.
        query_lengths: ints `[*B]`; later queries are empty rows, with output 0.

    Returns:
        A mask object; the lengths are its leaves.
    """
    for name, lengths in (("key_lengths", key_lengths), ("query_lengths", query_lengths)):
        if lengths is not None and not isinstance(lengths, (int, np.integer)):
            _check_ids(name, lengths)
    return Padding(key_lengths, query_lengths)


def segments(
    query_ids: AnyArray, key_ids: AnyArray | None = None, padding_id: int | None = None
) -> Mask:
    """Packed sequences: keys with the query's segment id are visible.

    Args:
        query_ids: ints `[T]` or `[*B, T]`, any values in any order.
        key_ids: ints `[S]` or `[*B, S]`; by default `query_ids`, for self-attention.
        padding_id: the id of padding: such keys are masked, such queries are empty rows.

    Returns:
        A mask object; the ids are its leaves.
    """
    _check_ids("query_ids", query_ids)
    if key_ids is not None:
        _check_ids("key_ids", key_ids)
    for name, ids in (("query_ids", query_ids), ("key_ids", key_ids)):
        if ids is not None and ids.ndim < 1:
            raise ValueError(f"{name} must be [T] or [*B, T], got a scalar")
    if padding_id is not None:
        if isinstance(padding_id, bool) or not isinstance(padding_id, (int, np.integer)):
            raise TypeError(f"padding_id must be an integer, got {type(padding_id).__name__}")
        padding_id = int(padding_id)
    return Segments(*_in_32_bits(query_ids, key_ids, padding_id))


def _in_32_bits(
    query_ids: Any, key_ids: Any, padding_id: int | None
) -> tuple[Any, Any, int | None]:
    """The ids if they fit in 32 bits; else their ranks, which preserve equality."""
    given = [ids for ids in (query_ids, key_ids) if ids is not None]
    wide = [not fits_int32(ids) for ids in given if isinstance(ids, np.ndarray)]
    if not any(wide):
        return query_ids, key_ids, padding_id
    if len(wide) < len(given):
        if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
            return query_ids, key_ids, padding_id
        raise ValueError(
            "query_ids or key_ids exceed 32 bits, and not both are NumPy arrays: number the "
            "segments from 0, or enable 64 bits"
        )
    # As Python's integers: int64 and uint64 have no common dtype.
    numbers = np.concatenate([ids.astype(object).ravel() for ids in given])
    values, ranks = np.unique(numbers, return_inverse=True)
    first, second = np.split(ranks.ravel().astype(np.int32), [query_ids.size])
    key_ranks = None if key_ids is None else second.reshape(key_ids.shape)
    padding_rank = {value: rank for rank, value in enumerate(values)}.get(padding_id)
    return first.reshape(query_ids.shape), key_ranks, padding_rank


def from_array(array: AnyArray) -> Mask:
    """A mask from a boolean array, True = may attend.

    Args:
        array: bool, broadcastable to `[*B, N, T, S]` by NumPy's rule; `[T, S]` will do.

    Returns:
        A mask object; the array is its leaf.

    Raises:
        TypeError: the array is not boolean. For a 0/1 array, such as the default of Flax's
            `make_causal_mask`, use `mask.astype(bool)`; for additive values use `bias=`.
    """
    as_array("mask", array)
    if array.dtype != np.bool_:
        raise TypeError(
            f"mask must be boolean (True = may attend), got dtype {np.dtype(array.dtype).name}: "
            "for a 0/1 array write mask.astype(bool); for additive values use bias="
        )
    missing = (1,) * max(0, 2 - array.ndim)
    return FromArray(array.reshape(*missing, *array.shape) if missing else array)
