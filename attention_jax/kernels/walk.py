"""The walk over the plane that the block kernels share.

Outside go the query blocks, one after another; inside, the key blocks that each of them visits. The
state of a query block lives only inside, and the finished rows are what the outer loop collects: no
loop carries anything of length T, so a visit costs its own block and nothing else, forward and
transposed.

Both loops' bodies are under `jax.checkpoint`. Differentiated, the outer loop saves nothing of a block
and the inner one no more than the running states of a single query block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED

Visit = Callable[[Any, Array, Array, bool], Any]


def walk(
    length: int,
    size: int,
    kinds: Any,
    start: Callable[[Array], Any],
    visit: Visit,
    close: Callable[[Array, Any], Any],
) -> Any:
    """Visits the blocks of one head's plane.

    Args:
        length: T, the number of rows.
        size: Tb, rows of a query block.
        kinds: int8 `[nT, nS]`, NumPy where it is known while tracing.
        start: `start(i)` is the state of query block i before any visit.
        visit: `visit(state, i, j, partial)` is the state after key block j.
        close: `close(i, state)` is query block i's part of the result, leaves `[Tb, ...]`.

    Returns:
        The results of all query blocks put together, leaves `[T, ...]`.
    """
    columns, kinds = _visits(kinds)
    present = _present(kinds)

    def query_block(xs: tuple[Array, Array, Array]) -> Any:
        i, columns, kinds = xs

        def key_block(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
            j, kind = xs

            def branch(kind: int) -> Callable[[Any], Any]:
                if kind == SKIPPED:
                    return lambda state: state
                return lambda state: visit(state, i, j, kind == PARTIAL)

            if len(present) == 1:
                return branch(present[0])(state), None
            index = jnp.searchsorted(np.asarray(present, np.int32), kind.astype(jnp.int32))
            return jax.lax.switch(index, [branch(kind) for kind in present], state), None

        body = jax.checkpoint(key_block, prevent_cse=False)
        return close(i, jax.lax.scan(body, start(i), (columns, kinds))[0])

    rows = jnp.arange(columns.shape[0], dtype=jnp.int32)
    body = jax.checkpoint(query_block, prevent_cse=False)
    blocks = jax.lax.map(body, (rows, jnp.asarray(columns), jnp.asarray(kinds)))
    return jax.tree.map(lambda x: _join(x, length), blocks)


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


def _present(kinds: Any) -> tuple[int, ...]:
    """The kinds of block that occur, all three where they are traced."""
    if isinstance(kinds, np.ndarray):
        return tuple(int(kind) for kind in np.unique(kinds))
    return (SKIPPED, PARTIAL, FULL)


def _join(x: Array, length: int) -> Array:
    """Blocks `[n, size, ...]` put together; the last one overlaps where the size does not divide."""
    rest = length % x.shape[1]
    if rest == 0:
        return x.reshape(length, *x.shape[2:])
    head = x[:-1].reshape(length - rest, *x.shape[2:])
    return jnp.concatenate([head, x[-1, x.shape[1] - rest :]])
