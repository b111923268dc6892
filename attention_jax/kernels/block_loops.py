"""Loops over the blocks of the [T, S] plane.

`scan_rows` loops over query blocks and, inside, over the visited key blocks of each. The inner loop
carries the state of one query block, the outer loop collects finished rows: no loop carries arrays
of length T, so that each step costs O(block), forward and transposed. `sum_blocks` sums linear
contributions in one loop over all visited blocks. A plane of a single block needs no loop.

The bodies are under `jax.checkpoint`. In reverse mode the outer loop saves nothing of a block, and
the inner loop only the running states of a single query block.
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


def scan_rows(
    length: int,
    size: int,
    kinds: Any,
    start: Callable[[Array], Any],
    fetch: Callable[[Array, Array], Any],
    step: Callable[[Any, Any, Array, bool], Any],
    close: Callable[[Array, Any], Any],
    *,
    split: bool = False,
) -> Any:
    """Scans the visited blocks of one head's plane, query block by query block.

    Args:
        length: T, the number of rows.
        size: Tb, rows of a query block.
        kinds: int8 `[nT, nS]`, NumPy if it is known while tracing.
        start: `start(i)` is the initial state of query block i.
        fetch: `fetch(i, j)` slices the whole arrays for block (i, j). It is called outside the
            branches, whose transposes would each make a cotangent of full length.
        step: `step(state, fetched, j, partial=partial)` is the state after key block j.
        close: `close(i, state)` is query block i's part of the result, leaves `[Tb, ...]`.
        split: Whether a row's loop over traced kinds is split into parts, of which those without
            a visited block are skipped. It does not pay off if the loop is transposed: each part
            makes cotangents of full length. (A while loop could not be transposed at all, and JAX
            may transpose a function with a custom rule: inside a scan it drops the rule.)

    Returns:
        The concatenated results of all query blocks, leaves `[T, ...]`.
    """
    if kinds.shape == (1, 1):
        zero = jnp.int32(0)

        def whole(fetched: Any) -> Any:
            return close(zero, step(start(zero), fetched, zero, _single_is_partial(kinds)))

        # a single row saves no more than the size of the key
        return (whole if size == 1 else jax.checkpoint(whole))(fetch(zero, zero))

    def query_block(present: tuple[int, ...], xs: tuple[Array, Array, Array]) -> Any:
        i, columns, kinds = xs

        def key_block(state: Any, xs: tuple[Array, Array]) -> tuple[Any, None]:
            j, kind = xs
            return _by_kind(present, kind, step, lambda x, *_: x, state, fetch(i, j), j), None

        body = jax.checkpoint(key_block, prevent_cse=False)
        state = vary_as(start(i), (fetch(i, columns[0]), i, columns, kinds))
        if not split or kinds.size <= _FEW_COLUMNS:
            return close(i, jax.lax.scan(body, state, (columns, kinds))[0])

        def run(state: Any, kinds: Array, columns: Array) -> Any:
            return jax.lax.scan(body, state, (columns, kinds))[0]

        return close(i, _by_part(run, state, in_parts(kinds, columns)))

    split = split and not isinstance(kinds, np.ndarray)
    groups, blocks = in_columns(one_kind(kinds) if split else kinds), []
    for rows, columns, chosen in groups:
        row = functools.partial(query_block, _present(chosen))
        outer = jax.checkpoint(row, prevent_cse=False)
        blocks.append(jax.lax.map(outer, tuple(map(jnp.asarray, (rows, columns, chosen)))))
    if len(blocks) == 1:
        return jax.tree.map(lambda x: _join(x, length), blocks[0])
    order = np.argsort(np.concatenate([rows for rows, *_ in groups])).astype(np.int32)
    return jax.tree.map(lambda *xs: _join(jnp.concatenate(xs)[order], length), *blocks)


def sum_blocks(
    sums: Any,
    block: tuple[int, int],
    kinds: Any,
    fetch: Callable[[Array, Array], Any],
    contribute: Callable[[Any, bool], Any],
) -> Any:
    """Sums the contributions of the visited blocks to their rows.

    For known kinds there is one loop over the full and one over the partial blocks, without
    branches. A contribution is added in place, so a step costs O(block); its transpose is also a
    step over one block, because neither the sums nor the arrays of `fetch` are carried through more
    than one loop.

    Traced kinds are sorted, visited blocks first, and processed in a few parts; a part without a
    visited block is skipped and costs one pass over the arrays.

    Args:
        sums: The initial sums, leaves `[T, ...]`, usually zeros.
        block: (query, key) size of a block.
        kinds: int8 `[nT, nS]`, NumPy if it is known while tracing.
        fetch: `fetch(i, j)` slices the whole arrays for block (i, j).
        contribute: `contribute(fetched, partial=partial)`, leaves `[Tb, ...]` with the structure of
            `sums`.

    Returns:
        The sums, leaves `[T, ...]`.
    """
    zero = jnp.int32(0)
    if kinds.shape == (1, 1):
        whole = jax.checkpoint(lambda fetched: contribute(fetched, _single_is_partial(kinds)))
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
                # XLA adds in place; reading a slice and writing back its sum would not be linear
                # in `part` alone, and its transpose would copy the whole sum
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


# Up to these numbers of key blocks of a row, or of pairs of blocks, traced kinds take one loop.
_FEW_COLUMNS, _FEW_PAIRS = 8, 64
_any_left = one_for_all(lambda left: jnp.any(left, 0))


def _by_part(run: Callable[..., Any], state: Any, parts: tuple[Array, ...]) -> Any:
    """`run(state, kinds, ...)` for every part of `in_parts` that has a visited block."""

    def some(state: Any, part: tuple[Array, ...]) -> tuple[Any, None]:
        left = _any_left(jnp.any(part[0] != SKIPPED))
        return jax.lax.cond(left, lambda s: run(s, *part), lambda s: s, state), None

    return jax.lax.scan(jax.checkpoint(some, prevent_cse=False), state, parts)[0]


def _by_kind(
    present: tuple[int, ...],
    kind: Array,
    compute: Callable[..., Any],
    skip: Callable[..., Any],
    *operands: Any,
) -> Any:
    """`compute(*operands, partial)` or `skip(*operands)`; without a branch if one kind occurs."""

    def branch(kind: int) -> Callable[..., Any]:
        if kind == SKIPPED:
            return skip
        return functools.partial(compute, partial=kind == PARTIAL)

    if present in ((PARTIAL,), (FULL,)):
        return compute(*operands, partial=present == (PARTIAL,))
    if present == (SKIPPED,):
        return skip(*operands)
    kind = one_kind(kind)
    index = sum((kind > least).astype(jnp.int32) for least in present[:-1])
    return jax.lax.switch(index, [branch(kind) for kind in present], *operands)


def _single_is_partial(kinds: Any) -> bool:
    """Whether a single block is partial; a block of traced kind is treated as partial."""
    return not (isinstance(kinds, np.ndarray) and kinds[0, 0] == FULL)


def block_start(index: Any, size: int, length: int) -> Any:
    """First row or column of a block; the last block starts earlier if it would overrun."""
    return jnp.minimum(index * size, length - size) if length % size else index * size


def _present(kinds: Any) -> tuple[int, ...]:
    """The kinds of block that occur; all three if they are traced."""
    if isinstance(kinds, np.ndarray):
        return tuple(int(kind) for kind in np.unique(kinds))
    return (SKIPPED, PARTIAL, FULL)


def _join(x: Array, length: int) -> Array:
    """Concatenates blocks `[n, size, ...]`; the last one may overlap its neighbour."""
    rest = length % x.shape[1]
    if rest == 0:
        return x.reshape(length, *x.shape[2:])
    head = x[:-1].reshape(length - rest, *x.shape[2:])
    return jnp.concatenate([head, x[-1, x.shape[1] - rest :]])
