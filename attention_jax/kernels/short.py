"""Attention of short sequences without a mask on a CPU: all heads at once, in a form XLA fuses.

    out = exp(x - max x) · v / Σ exp(x - max x),   x = q kᵀ

XLA's CPU compiler fuses this, including the products, into one kernel that does not write the
planes to memory: at T = S = 256 it takes 0.4 of the time of a loop over heads. A mask, a bias or a
second result prevents the fusion; from lengths of 512 on the planes exceed the cache.

Derivatives are those of the online softmax with recomputation (`softmax_tangent`): they need the
log-sum-exp of each row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.leading_axes import map_leading
from attention_jax._core.numerics import precision_of_products
from attention_jax.kernels import softmax_tangent
from attention_jax.kernels import tiling as tilings
from attention_jax.kernels.block import raw_logits, weights_times
from attention_jax.kernels.online_softmax import attend_heads
from attention_jax.kernels.problem import Problem, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling, whole_plane

DERIVATIVES = ("jvp", "vjp", "any nesting")

_LONGEST = 256


def why_not(request: Request) -> str | None:
    """Why this kernel cannot run the request on this machine, or None."""
    layout = request.layout
    if not tilings.on_one_cpu():
        return "it runs on a single CPU device: elsewhere heads may be sharded, or nothing is fused"
    if layout.symbolic_lengths:
        return f"it needs known lengths, got symbolic {layout.symbolic_lengths}"
    if max(layout.T, layout.S) > _LONGEST:
        return f"T and S must be at most {_LONGEST}, got T = {layout.T} and S = {layout.S}"
    if 0 in (layout.H, layout.V):
        return f"it needs H > 0 and V > 0, got H = {layout.H} and V = {layout.V}"
    if not request.score.is_product:
        return f"score {request.score!r} is not a product of a query and a key"
    if request.accumulator != jnp.float32:
        return f"it accumulates in float32, the request in {request.accumulator}"
    for name in ("mask", "bias", "query_positions", "key_positions", "block_size"):
        if getattr(request, name) is not None:
            return f"it does not support {name}"
    if request.dropout_rate > 0:
        return "it has no dropout"
    return "it computes no statistics" if request.statistics else None


def tile(request: Request) -> Tiling:
    """All pairs in one block; the derivative loops over heads."""
    return whole_plane(request, loop=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def run(request: Request, tiling: Tiling) -> Result:
    """Computes the request."""
    with precision_of_products(request.precision):
        problem, facts = lower(request, merge=False)

        def one(head: Problem) -> Array:
            logits = raw_logits(head).astype(facts.accumulator)
            powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
            out = weights_times(powers, head.sides.key["value"])
            return out / jnp.sum(powers, axis=-1, keepdims=True)

        return finish(request, facts, map_leading(one, problem, facts.sizes))


@run.defjvp
def _run_jvp(tiling: Tiling, primals: Any, tangents: Any) -> Any:
    def recomputing(request: Request) -> Result:
        return attend_heads(request, tiling, softmax_tangent.attend_head)

    return jax.jvp(recomputing, primals, tangents)
