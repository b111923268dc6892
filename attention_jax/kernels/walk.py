"""The walk over the plane that the block kernels share.

Outside go the query blocks, one after another; inside, the key blocks that each of them visits. The
state of a query block lives only inside, and the finished rows are what the outer loop collects: no
loop carries anything of length T, so a visit costs its own block and nothing else, forward and
transposed.

Both loops' bodies are under `jax.checkpoint`. Differentiated, the outer loop saves nothing of a
block and the inner one no more than the running states of a single query block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.agree import one_for_all
from attention_jax._core.axes import Array
from attention_jax._core.manual import vary_as
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED


def walk(
    length: int,
    size: int,
    kinds: Any,
    start: Callable[[Array], Any],
    fetch: Callable[[Array, Array], Any],
    visit: Callable[[Any, Any, Array, bool], Any],
    close: Callable[[Array, Any], Any],
) -> Any:
    """Visits the blocks of one head's plane.

    Args:
        length: T, the number of rows.
        size: Tb, rows of a query block.
        kinds: int8 `[nT, nS]`, NumPy where it is known while tracing.
        start: `start(i)` is the state of query block i before any visit.
        fetch: `fetch(i, j)` is what a visit needs of the whole arrays. It stays outside the
            branches, whose transposes would make a cotangent as long as the arrays every time.
        visit: `visit(state, fetched, j, partial)` is the state after key block j.
        close: `close(i, state)` is query block i's part of the result, leaves `[Tb, ...]`.

    Returns:
        The results of all query blocks put together, leaves `[T, ...]`.
    """

    def query_block(present: tuple[int, ...], xs: tuple[Array, Array, Array]) -> Any:
        i, columns, kinds = xs

        def key_block(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
            j, kind = xs

            def visited(state: Any, fetched: Any, partial: bool) -> Any:
                return visit(state, fetched, j, partial)

            return _by_kind(present, kind, visited, lambda x, _: x, state, fetch(i, j)), None

        body = jax.checkpoint(key_block, prevent_cse=False)
        state = vary_as(start(i), (fetch(i, columns[0]), i, columns, kinds))
        return close(i, jax.lax.scan(body, state, (columns, kinds))[0])

    groups, blocks = _groups(*_visits(kinds)), []
    for rows, columns, chosen in groups:
        row = functools.partial(query_block, _present(chosen))
        outer = jax.checkpoint(row, prevent_cse=False)
        blocks.append(jax.lax.map(outer, tuple(map(jnp.asarray, (rows, columns, chosen)))))
    if len(blocks) == 1:
        return jax.tree.map(lambda x: _join(x, length), blocks[0])
    order = np.argsort(np.concatenate([rows for rows, *_ in groups])).astype(np.int32)
    return jax.tree.map(lambda *xs: _join(jnp.concatenate(xs)[order], length), *blocks)


def sweep(
    sums: Any,
    block: tuple[int, int],
    kinds: Any,
    fetch: Callable[[Array, Array], Any],
    contribute: Callable[[Any, bool], Any],
) -> Any:
    """Adds up what each visited block contributes to its rows: a walk for linear functions.

    One loop over the visited blocks alone, for known kinds one over the full and one over the
    partial ones, without a branch. A contribution is added in place, so a visit costs its own
    block; and the transpose of each step is again a step that touches one block, because neither
    the sums nor the arrays behind `fetch` are carried through more than one loop.

    Args:
        sums: where to start from, leaves `[T, ...]`, commonly zeros.
        block: (query, key) size of a block.
        kinds: int8 `[nT, nS]`, NumPy where it is known while tracing.
        fetch: `fetch(i, j)` is what block (i, j) needs of the whole arrays.
        contribute: `contribute(fetched, partial)`, leaves `[Tb, ...]` in the structure of `sums`.

    Returns:
        The sums, leaves `[T, ...]`.
    """
    size = block[0]

    def nothing(fetched: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), sums)
        return vary_as(zeros, (fetched, kinds))

    zero = jnp.int32(0)
    sums = vary_as(sums, (fetch(zero, zero), kinds))

    def loop(sums: Any, present: tuple[int, ...], i: Any, j: Any, kind: Any) -> Any:
        def step(sums: Any, xs: tuple[Array, Array, Array]) -> tuple[Any, None]:
            i, j, kind = xs
            new = _by_kind(present, kind, contribute, nothing, fetch(i, j))

            def add(total: Array, part: Array) -> Array:
                at = block_start(i, size, total.shape[0])
                # XLA adds in place; a slice that is read, added to and written back would not be
                # linear in the part alone, and its transpose would copy the whole sum
                return total + jax.lax.dynamic_update_slice_in_dim(
                    vary_as(jnp.zeros_like(total), part), part, at, 0
                )

            return jax.tree.map(add, sums, new), None

        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), sums, (i, j, kind))[0]

    if not isinstance(kinds, np.ndarray):
        i, j = (x.ravel().astype(np.int32) for x in np.indices(kinds.shape))
        return loop(sums, _present(kinds), i, j, kinds.ravel())
    for kind in (FULL, PARTIAL):
        i, j = (x.astype(np.int32) for x in np.nonzero(kinds == kind))
        if i.size:
            sums = loop(sums, (kind,), i, j, np.full(i.shape, kind, np.int8))
    return sums


def _join_kinds(kinds: Array) -> Array:
    """One kind of block for several, by the first axis."""
    whole, none = jnp.min(kinds, 0) == FULL, jnp.max(kinds, 0) == SKIPPED
    return jnp.where(whole, np.int8(FULL), jnp.where(none, np.int8(SKIPPED), np.int8(PARTIAL)))


_one_kind = one_for_all(_join_kinds)


def _by_kind(
    present: tuple[int, ...],
    kind: Array,
    visit: Callable[..., Any],
    skip: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`visit(*operands, partial)` or `skip(*operands)`; without a branch where one kind occurs."""

    def branch(kind: int) -> Callable[..., Any]:
        if kind == SKIPPED:
            return skip
        return lambda *operands: visit(*operands, kind == PARTIAL)

    if len(present) == 1:
        return branch(present[0])(*operands)
    kind = _one_kind(kind)
    index = sum((kind > least).astype(jnp.int32) for least in present[:-1])
    return jax.lax.switch(index, [branch(kind) for kind in present], *operands)


def block_start(index: Any, size: int, length: int) -> Any:
    """First row or column of a block; the last block starts early where it would reach beyond."""
    return jnp.minimum(index * size, length - size) if length % size else index * size


def _visits(kinds: Any) -> tuple[Any, Any]:
    """For each query block its key blocks and their kinds, `[nT, most visits]`.

    Known kinds leave out what nobody visits; a row with fewer visits than others is filled up with
    skipped blocks. Traced kinds keep every column.
    """
    if not isinstance(kinds, np.ndarray):
        columns = np.broadcast_to(np.arange(kinds.shape[1], dtype=np.int32), kinds.shape)
        return columns, kinds
    order = np.argsort(kinds == SKIPPED, axis=1, kind="stable").astype(np.int32)
    most = max(1, int((kinds != SKIPPED).sum(axis=1).max()))
    columns = order[:, :most]
    return columns, np.take_along_axis(kinds, columns, axis=1)


def _groups(columns: Any, kinds: Any) -> list[tuple[Any, Any, Any]]:
    """Rows, their key blocks and kinds, in groups that are walked one after the other.

    All rows of a group take as many steps as its longest. So a few rows that see everything, as
    those of global tokens, stand apart, where that leaves out more than half of all steps.
    """
    rows = np.arange(columns.shape[0], dtype=np.int32)
    if not isinstance(kinds, np.ndarray):
        return [(rows, columns, kinds)]
    counts = np.maximum(1, (kinds != SKIPPED).sum(axis=1))
    few = np.unique(counts)
    steps = [(counts <= n).sum() * n + (counts > n).sum() * few[-1] for n in few]
    best = int(few[int(np.argmin(steps))])
    if 2 * min(steps) > rows.size * few[-1]:
        return [(rows, columns, kinds)]
    apart = counts > best
    return [
        (rows[~apart], columns[~apart, :best], kinds[~apart, :best]),
        (rows[apart], columns[apart], kinds[apart]),
    ]


def _present(kinds: Any) -> tuple[int, ...]:
    """The kinds of block that occur, all three where they are traced."""
    if isinstance(kinds, np.ndarray):
        return tuple(int(kind) for kind in np.unique(kinds))
    return (SKIPPED, PARTIAL, FULL)


def _join(x: Array, length: int) -> Array:
    """Blocks `[n, size, ...]` put together; the last one may overlap its neighbour."""
    rest = length % x.shape[1]
    if rest == 0:
        return x.reshape(length, *x.shape[2:])
    head = x[:-1].reshape(length - rest, *x.shape[2:])
    return jnp.concatenate([head, x[-1, x.shape[1] - rest :]])
