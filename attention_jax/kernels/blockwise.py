"""Blockwise attention: the online softmax under `jax.checkpoint`, plain JAX all the way.

Any nesting of transformations works. Reverse mode recomputes: the outer loop over query blocks
saves nothing of a block, and inside one query block only the running state between key blocks,
which is O(S) for blocks of similar sizes. So memory is O(T + S), forward and backward.

References:
    Rabe, Staats 2021, "Self-attention Does Not Need O(n²) Memory", arXiv:2112.05682.
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from typing import Any

import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.mapping import map_leading
from attention_jax._core.numerics import precision_of_products, widen_low
from attention_jax.kernels.block import cut, dtypes_of, narrow
from attention_jax.kernels.block_loops import block_start, walk
from attention_jax.kernels.online_softmax import Online, Rows, close, start, statistics_of, update
from attention_jax.kernels.problem import Problem, Static, block_kinds, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tiling
from attention_jax.kernels.traced import trace_user_code

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """What of the request this kernel cannot do: symbolic lengths, which have no blocks."""
    return request.why_no_blocks


def run(request: Request) -> Result:
    """Computes the request."""
    with precision_of_products(request.precision):
        block, loop = tiling(request)
        problem, facts = lower(request, merge=loop)
        kinds = block_kinds(problem, facts, block, loop=loop)
        known = isinstance(kinds, np.ndarray)
        problem = trace_user_code(problem, facts, block)
        dtypes = dtypes_of(problem)

        def one(parts: tuple[Problem, Any]) -> tuple[Array, ...]:
            head, traced = parts
            rows = attend_head(head, dtypes, facts, block, kinds if known else traced)
            return rows.out, *(statistics_of(head, dtypes, rows) if facts.statistics else ())

        parts = (problem, None if known else kinds)
        return finish(request, facts, *map_leading(one, parts, facts.sizes, loop=loop))


def attend_head(
    head: Problem, dtypes: Problem, facts: Static, block: tuple[int, int], kinds: Any
) -> Rows:
    """One head of one example, in blocks of these dtypes."""
    layout, wide = facts.layout, widen_low(head)

    def begin(i: Array) -> Online:
        return start(block[0], layout.V, facts.accumulator)

    def fetch(i: Array, j: Array) -> Problem:
        return narrow(cut(wide, facts, block, i, j), dtypes)

    def visit(state: Online, fetched: Problem, j: Array, partial: bool) -> Online:
        at = block_start(j, block[1], layout.S)
        return update(state, fetched, facts, at, partial=partial)

    return walk(layout.T, block[0], kinds, begin, fetch, visit, lambda i, state: close(state))
