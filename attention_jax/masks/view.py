"""The inputs and results of a mask's methods."""

from typing import Any, NamedTuple

import jax

from attention_jax._core.axes import Shape, Size
from attention_jax._core.term import Sides


class View(NamedTuple):
    """Data of a mask with queries as rows and keys as columns.

    `sides.query` leaves are `[..., T, 1]`, `sides.key` leaves `[..., 1, S]`, `sides.pair` leaves
    `[..., #T, #S]`; positions likewise. `Mask.decide` takes two views, of the minimum and of the
    maximum in each block, with T and S counting blocks.
    """

    sides: Sides
    query_positions: Any
    key_positions: Any


class Verdict(NamedTuple):
    """Bounds for the pairs of a block: whether some may be visible, and whether all are."""

    some: Any
    every: Any


class Interval(NamedTuple):
    """Bounds of visible keys: for a query at p, none outside `p - left .. p + right`.

    None is no bound, or an unknown one.
    """

    left: int | None
    right: int | None


class Band(NamedTuple):
    """A mask that is an interval of array indices: keys t - left .. t + right for query t.

    Attributes:
        left: None is no bound.
        right: None is no bound; it may be negative.
        start: the position of query 0, relative to that of key 0.
    """

    left: int | None
    right: int | None
    start: int = 0


class SequenceLengths(NamedTuple):
    """A mask of padding: the numbers of keys and of queries `[*B]`; None is all queries."""

    key_lengths: Any
    query_lengths: Any


class SegmentIds(NamedTuple):
    """A mask of packed sequences: ids of queries and keys; `key_ids` None are the queries'."""

    query_ids: Any
    key_ids: Any
    padding_id: int | None


class Lengths(NamedTuple):
    """The lengths of a call, and whether its positions are the default ones.

    `lead` is `(*B, N)`, or empty if it is not known.
    """

    T: Size
    S: Size
    default_positions: bool = True
    lead: Shape = ()


def spread(sides: Sides) -> Sides:
    """The data of a `View`: queries as rows, keys as columns."""
    return Sides(
        query=jax.tree.map(lambda x: x[..., :, None], sides.query),
        key=jax.tree.map(lambda x: x[..., None, :], sides.key),
        pair=sides.pair,
    )


def whole_view(sides: Sides, query_positions: Any, key_positions: Any) -> View:
    """The view of the whole plane.

    Args:
        sides: what the mask's `prepare` returned.
        query_positions: ints `[T]` or `[*B, T]`.
        key_positions: ints `[S]` or `[*B, S]`.
    """

    def per_head(positions: Any) -> Any:
        # batch axes come before a head axis of size 1
        return positions if positions.ndim == 1 else positions[..., None, :]

    rows, columns = per_head(query_positions), per_head(key_positions)
    view = View(spread(sides), rows[..., :, None], columns[..., None, :])
    rank = max(x.ndim for x in jax.tree.leaves(view))
    return jax.tree.map(lambda x: x.reshape((1,) * (rank - x.ndim) + x.shape), view)
