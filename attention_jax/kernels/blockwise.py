"""Blockwise attention: the online softmax under `jax.checkpoint`, plain JAX all the way.

Any nesting of transformations works. Reverse mode recomputes: the outer loop over query blocks saves
nothing of a block, and inside one query block only the running state between key blocks, which is
O(S) for blocks of similar sizes. So memory is O(T + S), forward and backward.

References:
    Rabe, Staats 2021, "Self-attention Does Not Need O(n²) Memory", arXiv:2112.05682.
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.mapping import map_leading
from attention_jax._core.numerics import precision_of_products
from attention_jax.kernels.block import accumulator, by_kind, cut, kinds_present
from attention_jax.kernels.online import Online, Rows, close, start, top_logits, update
from attention_jax.kernels.problem import Problem, Static, block_kinds, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tiling
from attention_jax.masks.block_map import SKIPPED

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """What of the request this kernel cannot do: nothing."""
    return None


def run(request: Request) -> Result:
    """Computes the request."""
    with precision_of_products(request.precision):
        problem, facts = lower(request)
        block, loop = tiling(request)
        kinds = block_kinds(problem, facts, block, loop=loop)
        known = isinstance(kinds, np.ndarray)

        def one(parts: tuple[Problem, Any]) -> tuple[Array, Array, Array, Array]:
            head, traced = parts
            rows = attend_head(head, facts, block, kinds if known else traced)
            top = top_logits(head, rows) if facts.statistics else rows.lse
            return rows.out, rows.lse, rows.mean, top

        parts = (problem, None if known else kinds)
        return finish(request, facts, *map_leading(one, parts, facts.sizes, loop=loop))


def attend_head(head: Problem, facts: Static, block: tuple[int, int], kinds: Any) -> Rows:
    """One head of one example: query blocks outside, the key blocks that each visits inside."""
    layout, dtype = facts.layout, accumulator(head)
    columns, kinds = visits(kinds)

    def query_block(xs: tuple[Array, Array, Array]) -> Rows:
        i, columns, kinds = xs

        def key_block(state: Online, xs: tuple[Array, Array]) -> tuple[Online, None]:
            j, kind = xs
            at = jnp.minimum(j * block[1], layout.S - block[1])

            def visit(state: Online, partial: bool) -> Online:
                return update(state, cut(head, facts, block, i, j), facts, at, partial=partial)

            return by_kind(present, kind, visit, lambda state, _: state, state), None

        body = jax.checkpoint(key_block, prevent_cse=False)
        state = start(block[0], layout.V, dtype)
        return close(jax.lax.scan(body, state, (columns, kinds))[0])

    present = kinds_present(kinds)
    every = jnp.arange(columns.shape[0], dtype=jnp.int32)
    rows = jax.lax.map(
        jax.checkpoint(query_block, prevent_cse=False),
        (every, jnp.asarray(columns), jnp.asarray(kinds)),
    )
    return jax.tree.map(lambda x: join(x, layout.T), rows)


def visits(kinds: Any) -> tuple[Any, Any]:
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


def join(x: Array, length: int) -> Array:
    """Blocks `[n, size, ...]` put together; the last one overlaps where the size does not divide."""
    rest = length % x.shape[1]
    if rest == 0:
        return x.reshape(length, *x.shape[2:])
    head = x[:-1].reshape(length - rest, *x.shape[2:])
    return jnp.concatenate([head, x[-1, x.shape[1] - rest :]])
