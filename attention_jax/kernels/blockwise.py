"""Blockwise attention: the online softmax under `jax.checkpoint`, differentiated by JAX.

Any nesting of transformations works. Reverse mode recomputes: the outer loop over query blocks
saves nothing of a block, and the inner loop only the running state between key blocks, which is
O(S) for blocks of similar sizes. So memory is O(T + S), forward and backward.

References:
    Rabe, Staats 2021, "Self-attention Does Not Need O(n²) Memory", arXiv:2112.05682.
    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

from typing import Any

from attention_jax._core.numerics import widen_low
from attention_jax.kernels import online_softmax
from attention_jax.kernels.online_softmax import Rows, attend_heads
from attention_jax.kernels.problem import Problem, Static
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling, tile

__all__ = ["DERIVATIVES", "run", "tile", "why_not"]

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """Why this kernel cannot run the request: symbolic lengths cannot be divided into blocks."""
    return request.why_no_blocks


def run(request: Request, tiling: Tiling) -> Result:
    """Computes the request."""
    return attend_heads(request, tiling, _attend_head)


def _attend_head(
    head: Problem, kinds: Any, dtypes: Problem, facts: Static, block: tuple[int, int]
) -> Rows:
    # Cotangents of all blocks are summed in the dtype of the sliced arrays.
    return online_softmax.attend_head(widen_low(head), kinds, dtypes, facts, block)
