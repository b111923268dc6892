"""Flash attention: blocks forward, and a derivative that recomputes them from the log-sum-exp.

    forward    the online softmax over the visited blocks (`online_softmax`)
    tangent    a sum over the same blocks, recomputed (`softmax_tangent`)

Memory is O(T + S), forward and backward, in every nesting of jvp and vjp.

References:
    Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4.
"""

from attention_jax.kernels.online_softmax import attend_heads
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.softmax_tangent import attend_head
from attention_jax.kernels.tiling import Tiling, tile

__all__ = ["DERIVATIVES", "run", "tile", "why_not"]

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """Why this kernel cannot run the request: symbolic lengths cannot be divided into blocks."""
    return request.why_no_blocks


def run(request: Request, tiling: Tiling) -> Result:
    """Computes the request."""
    return attend_heads(request, tiling, attend_head)
