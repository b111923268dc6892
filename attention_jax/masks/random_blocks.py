"""Random blocks: each block of queries attends to a few random blocks of keys.

    allowed(p, s) = s // size in chosen[head, p // size]

The choice is a function of the PRNG key, the head and the query's position alone. A concrete key
gives a table at trace time and a static block map; a traced key gives traced arrays.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.checks import check_count, check_key
from attention_jax._core.numerics import is_concrete
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides
from attention_jax.masks.mask import Lengths, Mask, Verdict, View


@pytree
class Chosen(Mask):
    """The mask of a table of chosen key blocks, `[..., rows, blocks]`, as used in a kernel.

    `known` holds the arguments that made the table, if the PRNG key is concrete.
    """

    table: Any
    size: int = static()
    known: tuple[Any, ...] | None = static(default=None)

    def allowed(self, view: View) -> Any:
        """The key's block is one of those chosen for the query's block."""
        rows, keys = view.query_positions // self.size, view.key_positions // self.size
        table = _as(self.table, rows)
        inside = (rows >= 0) & (rows < table.shape[-2])
        found = _entries(table, (rows.clip(0, table.shape[-2] - 1),), 1)
        keys = keys.reshape((1,) * (found.ndim - 1 - keys.ndim) + keys.shape)
        hits = (found[..., i] == keys for i in range(found.shape[-1]))
        return functools.reduce(lambda a, b: a | b, hits) & inside

    def decide(self, low: View, high: View) -> Verdict:
        """From the number of chosen (row, block) pairs in the block's ranges."""
        first, last = (
            (x.query_positions // self.size, x.key_positions // self.size) for x in (low, high)
        )
        ends, table = (*first, *last), self.table
        if self.known is not None:
            table = _known(*self.known).reshape(table.shape)
        if all(isinstance(x, np.ndarray) for x in (table, *ends)) and _in_order(*ends):
            count = _count_in_order(table, first, last)
        else:
            count = _count(_as(table, *ends), first, last)
        area = (last[0] - first[0] + 1) * (last[1] - first[1] + 1)
        return Verdict(count > 0, count == area)


@pytree
class RandomBlocks(Mask):
    """`blocks` random key blocks for each query block."""

    key: Any  # a traced key, else None
    words: tuple[str, tuple[int, ...]] | None = static()
    length: int = static()
    size: int = static()
    blocks: int = static()
    num_heads: int | None = static()
    heads: tuple[int, ...] | None = static(default=None)  # the remaining ones of num_heads

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "random", {
            "key": self.key if self.words is None else self.words,
            "length": self.length,
            "block_size": self.size,
            "blocks": self.blocks,
            "num_heads": self.num_heads,
            "heads": self.heads,
        }

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Heads, rows and chosen blocks of the table."""
        rows = -(-self.length // self.size)
        return self.num_heads or 1, rows, min(self.blocks, rows)

    def _chosen(self) -> Chosen:
        if self.words is None:
            return Chosen(_of(self.heads, _choose(self.key, *self._sizes)), self.size)
        known = (self.words, *self._sizes, self.heads)
        return Chosen(_known(*known), self.size, known)

    def take_heads(self, heads: Sequence[int], count: int) -> "RandomBlocks":
        """The blocks of these heads, if they differ between heads."""
        if self.num_heads is None or count != len(self._left):
            return self
        return dataclasses.replace(self, heads=tuple(self._left[head] for head in heads))

    @property
    def _left(self) -> tuple[int, ...]:
        return tuple(range(self.num_heads or 1)) if self.heads is None else self.heads

    def prepare(self, lengths: Lengths) -> Sides:
        """An array that carries the head axis, if heads differ."""
        if self.num_heads is None:
            return Sides()
        return Sides(query=jnp.zeros((len(self._left), lengths.T), bool))

    def per_head(self) -> Chosen:
        """The table."""
        chosen = self._chosen()
        return dataclasses.replace(chosen, table=jnp.asarray(chosen.table))

    def by_index(self) -> tuple[Mask, ...]:
        """None: it compares positions."""
        return ()

    def _whole(self, rank: int) -> Chosen:
        """The table with leading axes of size 1, to match a view of this rank."""
        chosen = self._chosen()
        own = chosen.table.shape[1 if self.num_heads is None else 0 :]
        table = chosen.table.reshape((1,) * (rank - len(own)) + own)
        return dataclasses.replace(chosen, table=table)

    def allowed(self, view: View) -> Any:
        """As in `Chosen`."""
        return self._whole(view.query_positions.ndim).allowed(view)

    def decide(self, low: View, high: View) -> Verdict:
        """As in `Chosen`."""
        return self._whole(low.query_positions.ndim).decide(low, high)


def _choose(key: Any, heads: int, rows: int, blocks: int) -> Any:
    """Random subsets of `blocks` of `rows` per head and row, int32 `[heads, rows, blocks]`.

    Floyd's sampling algorithm, uniform over subsets: step i draws from the first rows - blocks + i
    + 1 blocks; a block already drawn is replaced by the last of these, which no earlier step could
    draw.
    """
    tops = jnp.arange(rows - blocks, rows, dtype=jnp.int32)
    draws = jax.random.randint(key, (heads, rows, blocks), 0, tops[None, None] + 1)
    chosen: list[Any] = []
    for i in range(blocks):
        draw, top = draws[..., i], rows - blocks + i
        taken = functools.reduce(lambda a, b: a | b, (draw == x for x in chosen), draw < 0)
        chosen.append(jnp.where(taken, top, draw))
    return jnp.stack(chosen, axis=-1)


def _of(heads: tuple[int, ...] | None, table: Any) -> Any:
    """The table of some heads; None is all."""
    return table if heads is None else table[np.array(heads)]


@functools.lru_cache(maxsize=64)
def _known(
    words: tuple[str, tuple[int, ...]],
    heads: int,
    rows: int,
    blocks: int,
    left: tuple[int, ...] | None,
) -> np.ndarray:
    name, bits = words
    with jax.ensure_compile_time_eval():
        key = jax.random.wrap_key_data(jnp.array(bits, jnp.uint32), impl=name)
        table = np.array(_of(left, _choose(key, heads, rows, blocks)))
    table.flags.writeable = False
    return table


def _as(table: Any, *others: Any) -> Any:
    """The table as a JAX array if any of the others is one."""
    return jnp.asarray(table) if any(isinstance(x, jax.Array) for x in others) else table


def _entries(table: Any, at: tuple[Any, ...], own: int) -> Any:
    """`table[..., *at]`, broadcast over leading axes; the last `own` axes are kept."""
    lead = table.ndim - own - len(at)
    at = tuple(x.reshape((1,) * (lead + 2 - x.ndim) + x.shape) for x in at)
    rank = at[0].ndim
    table = table.reshape((1,) * (rank - 2 - lead) + table.shape)
    grid = tuple(
        np.arange(size, dtype=np.int32).reshape((1,) * axis + (-1,) + (1,) * (rank - axis - 1))
        for axis, size in enumerate(table.shape[: rank - 2])
    )
    return table[(*grid, *at)]


def _count(table: Any, first: tuple[Any, Any], last: tuple[Any, Any]) -> Any:
    """Number of chosen pairs in the ranges, from two-dimensional prefix sums; O(rows²)."""
    xp = jnp if isinstance(table, jax.Array) else np
    rows = table.shape[-2]
    blocks = np.arange(rows, dtype=np.int32).reshape((1,) * table.ndim + (rows,))
    plane = (table[..., None] == blocks).any(-2).astype(np.int32)
    sums = xp.cumsum(xp.cumsum(plane, -1, dtype=np.int32), -2, dtype=np.int32)
    sums = xp.pad(sums, [(0, 0)] * (sums.ndim - 2) + [(1, 0), (1, 0)])
    (top, left), (bottom, right) = (
        tuple((x + step).clip(0, rows) for x in ends) for ends, step in ((first, 0), (last, 1))
    )

    def corner(row: Any, column: Any) -> Any:
        return _entries(sums, (row, column), 0)

    return corner(bottom, right) - corner(top, right) - corner(bottom, left) + corner(top, left)


def _in_order(*ends: np.ndarray) -> bool:
    """Whether the ranges are one-dimensional and sorted."""
    return all(x.size == max(x.shape) and bool((np.diff(x.ravel()) >= 0).all()) for x in ends)


def _count_in_order(table: np.ndarray, first: tuple[Any, Any], last: tuple[Any, Any]) -> np.ndarray:
    """`_count` for sorted ranges: each pair increments the rectangle of blocks that contain it."""
    (top, left), (bottom, right) = (tuple(x.ravel() for x in ends) for ends in (first, last))
    heads = table.reshape(-1, *table.shape[-2:])
    counts = np.zeros((heads.shape[0], top.size + 1, left.size + 1), np.int32)
    rows = np.broadcast_to(np.arange(heads.shape[1])[:, None], heads.shape[1:]).ravel()
    for count, chosen in zip(counts, heads, strict=True):
        columns = chosen.ravel()
        up, down = np.searchsorted(bottom, rows), np.searchsorted(top, rows, "right")
        west, east = np.searchsorted(right, columns), np.searchsorted(left, columns, "right")
        met = (up < down) & (west < east)
        for row, column, sign in ((up, west, 1), (down, west, -1), (up, east, -1), (down, east, 1)):
            np.add.at(count, (row[met], column[met]), sign)
    counts = counts.cumsum(-2).cumsum(-1)[:, :-1, :-1]
    rank = max(table.ndim, first[0].ndim)
    lead = (1,) * (rank - table.ndim) + table.shape[:-2]
    return counts.reshape(*lead, *counts.shape[-2:])


def random(
    key: Any, length: int, block_size: int, blocks: int = 3, num_heads: int | None = None
) -> Mask:
    """Random blocks: each block of queries attends to `blocks` random blocks of keys.

    The choice depends only on the PRNG key, the head and the query's position, so decoding over a
    cache uses the same mask as the full sequence. Use `jax.random.fold_in(key, layer)` for
    different blocks in each layer. With `causal()`, blocks in the future are masked.

    Args:
        key: a PRNG key, typed or raw. A concrete key gives a static block map.
        length: number of positions to choose from; queries at later positions have no visible key.
        block_size: positions in a block.
        blocks: number of distinct key blocks per query block; all blocks if there are fewer.
        num_heads: N for different blocks in each head; None shares them.

    Returns:
        A mask object.

    Example:
        >>> mask = random(jax.random.key(0), 12, block_size=2, blocks=1)
        >>> mask.to_array(12, 12).sum(axis=1).tolist()
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]

    References:
        Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", arXiv:2007.14062, §2,
        "random attention", and appendix D.
    """
    check_key("key", key)
    length, size, blocks = (
        check_count(name, value, 1)
        for name, value in (("length", length), ("block_size", block_size), ("blocks", blocks))
    )
    heads = None if num_heads is None else check_count("num_heads", num_heads, 1)
    if not is_concrete(key):
        return RandomBlocks(_typed(key), None, length, size, blocks, heads)
    with jax.ensure_compile_time_eval():
        key = _typed(key)
        bits = tuple(int(word) for word in np.asarray(jax.random.key_data(key)).ravel())
    return RandomBlocks(None, (str(jax.random.key_impl(key)), bits), length, size, blocks, heads)


def _typed(key: Any) -> Any:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if typed else jax.random.wrap_key_data(jnp.asarray(key))
