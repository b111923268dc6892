"""Loops over the blocks of the [T, S] plane.

`walk` loops over query blocks and, inside, over the key blocks that each of them visits. The inner
loop carries the state of one query block, the outer loop collects finished rows: no loop carries
anything of length T, so a visit costs its own block and nothing else, forward and transposed.
`sweep` sums contributions that are linear, in one loop over all visited blocks. A plane of a single
block takes no loop.

The bodies are under `jax.checkpoint`. Differentiated, the outer loop saves nothing of a block and
the inner one only the running states of a single query block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.batched_predicates import one_for_all
from attention_jax._core.mesh_axes import vary_as
from attention_jax.kernels.block_order import in_columns, in_parts, one_kind
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED


def walk(
    length: int,
    size: int,
    kinds: Any,
    start: Callable[[Array], Any],
    fetch: Callable[[Array, Array], Any],
    visit: Callable[[Any, Any, Array, bool], Any],
    close: Callable[[Array, Any], Any],
    *,
    parted: bool = False,
) -> Any:
    """Visits the blocks of one head's plane, query block by query block.

    Args:
        length: T, the number of rows.
        size: Tb, rows of a query block.
        kinds: int8 `[nT, nS]`, NumPy where it is known while tracing.
        start: `start(i)` is the state of query block i before any visit.
        fetch: `fetch(i, j)` is what a visit needs of the whole arrays. It stays outside the
            branches, whose transposes would make a cotangent as long as the arrays every time.
        visit: `visit(state, fetched, j, partial=partial)` is the state after key block j.
        close: `close(i, state)` is query block i's part of the result, leaves `[Tb, ...]`.
        parted: whether a query block's walk over traced kinds ends with its last visit, or soon
            after. A transposed walk would lose what that saves: each part of it makes cotangents as
            long as the arrays. (A loop that ends exactly there could not be transposed at all, and
            JAX may transpose a function with a rule of its own: it forgets the rule inside a scan.)

    Returns:
        The results of all query blocks put together, leaves `[T, ...]`.
    """
    if kinds.shape == (1, 1):
        zero = jnp.int32(0)

        def whole(fetched: Any) -> Any:
            return close(zero, visit(start(zero), fetched, zero, _look_into(kinds)))

        # what a single row saves is no larger than the key
        return (whole if size == 1 else jax.checkpoint(whole))(fetch(zero, zero))

    def query_block(present: tuple[int, ...], xs: tuple[Array, Array, Array]) -> Any:
        i, columns, kinds = xs

        def key_block(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
            j, kind = xs
            return _by_kind(present, kind, visit, lambda x, *_: x, state, fetch(i, j), j), None

        body = jax.checkpoint(key_block, prevent_cse=False)
        state = vary_as(start(i), (fetch(i, columns[0]), i, columns, kinds))
        if not parted or kinds.size <= _FEW_COLUMNS:
            return close(i, jax.lax.scan(body, state, (columns, kinds))[0])

        def run(state: Any, kinds: Array, columns: Array) -> Any:
            return jax.lax.scan(body, state, (columns, kinds))[0]

        return close(i, _by_part(run, state, in_parts(kinds, columns)))

    parted = parted and not isinstance(kinds, np.ndarray)
    groups, blocks = in_columns(one_kind(kinds) if parted else kinds), []
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

    Kinds that are traced put the visited blocks first and are walked in a few parts, each only if
    there is something left to visit: a part that is left out costs one pass over the arrays.

    Args:
        sums: where to start from, leaves `[T, ...]`, commonly zeros.
        block: (query, key) size of a block.
        kinds: int8 `[nT, nS]`, NumPy where it is known while tracing.
        fetch: `fetch(i, j)` is what block (i, j) needs of the whole arrays.
        contribute: `contribute(fetched, partial=partial)`, leaves `[Tb, ...]` with the structure of
            `sums`.

    Returns:
        The sums, leaves `[T, ...]`.
    """
    zero = jnp.int32(0)
    if kinds.shape == (1, 1):
        whole = jax.checkpoint(lambda fetched: contribute(fetched, _look_into(kinds)))
        return jax.tree.map(jnp.add, sums, whole(fetch(zero, zero)))
    size = block[0]

    def nothing(fetched: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), sums)
        return vary_as(zeros, (fetched, kinds))

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

    if isinstance(kinds, np.ndarray):
        for kind in (FULL, PARTIAL):
            i, j = (x.astype(np.int32) for x in np.nonzero(kinds == kind))
            if i.size:
                sums = loop(sums, (kind,), i, j, np.full(i.shape, kind, np.int8))
        return sums
    every, flat = _present(kinds), one_kind(kinds).ravel()
    i, j = (x.ravel().astype(np.int32) for x in np.indices(kinds.shape))

    def run(sums: Any, kind: Any, i: Any, j: Any) -> Any:
        return loop(sums, every, i, j, kind)

    if flat.size <= _FEW_PAIRS:
        return run(sums, flat, i, j)
    return _by_part(run, sums, in_parts(flat, jnp.asarray(i), jnp.asarray(j)))


# Up to so many key blocks of a row, or pairs of blocks, traced kinds are one loop.
_FEW_COLUMNS, _FEW_PAIRS = 8, 64
_any_left = one_for_all(lambda left: jnp.any(left, 0))


def _by_part(run: Callable[..., Any], state: Any, parts: tuple[Array, ...]) -> Any:
    """`run(state, kinds, ...)` of every part, as `in_parts` makes them, that has a visit in it."""

    def some(state: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
        left = _any_left(jnp.any(part[0] != SKIPPED))
        return jax.lax.cond(left, lambda s: run(s, *part), lambda s: s, state), None

    return jax.lax.scan(jax.checkpoint(some, prevent_cse=False), state, parts)[0]


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
        return functools.partial(visit, partial=kind == PARTIAL)

    if present in ((PARTIAL,), (FULL,)):
        return visit(*operands, partial=present == (PARTIAL,))
    if present == (SKIPPED,):
        return skip(*operands)
    kind = one_kind(kind)
    index = sum((kind > least).astype(jnp.int32) for least in present[:-1])
    return jax.lax.switch(index, [branch(kind) for kind in present], *operands)


def _look_into(kinds: Any) -> bool:
    """Whether a single block is partial; one whose kind is traced is treated as such."""
    return not (isinstance(kinds, np.ndarray) and kinds[0, 0] == FULL)


def block_start(index: Any, size: int, length: int) -> Any:
    """First row or column of a block; the last block starts early where it would reach beyond."""
    return jnp.minimum(index * size, length - size) if length % size else index * size


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
