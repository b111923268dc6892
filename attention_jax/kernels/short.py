"""Short sequences without a mask on a CPU: all heads at once, in the form that XLA fuses.

    out = exp(x - max x) · v / Σ exp(x - max x),   x = q kᵀ

Of this and nothing more XLA's CPU compiler makes one kernel, products included, that never writes
the planes to memory: at T = S = 256 it takes 0.4 of the time of a loop over heads. A mask, a bias
or another result beside `out` breaks the fusion, and from 512 on so does the cache.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.mapping import map_leading
from attention_jax._core.numerics import precision_of_products
from attention_jax.kernels.block import raw_logits, weights_times
from attention_jax.kernels.problem import Problem, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import on_one_cpu
from attention_jax.scores.similarity import Cosine, Dot, General, ScaledDot

Run = Callable[[Request], Result]
_LONGEST = 256


def fits(request: Request) -> bool:
    """Whether it is short, with a score that is a product, and asks for nothing but `out`."""
    layout = request.layout
    return (
        not layout.symbolic_lengths
        and max(layout.T, layout.S) <= _LONGEST
        and 0 not in (*layout.batch, layout.T, layout.S, layout.H, layout.V)
        and type(request.score) in (Dot, ScaledDot, General, Cosine)
        and request.mask is None
        and request.bias is None
        and request.query_positions is None
        and request.key_positions is None
        and request.dropout_key is None
        and request.block_size is None
        and not request.statistics
        and request.accumulator == jnp.float32
        and on_one_cpu()
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(plain: Run, request: Request) -> Result:
    """Computes a request that `fits`; derivatives are those of `plain`, which does any."""
    with precision_of_products(request.precision):
        problem, facts = lower(request, merge=False)

        def one(head: Problem) -> Array:
            logits = raw_logits(head).astype(facts.accumulator)
            powers = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
            out = weights_times(powers, head.sides.key["value"])
            return out / jnp.sum(powers, axis=-1, keepdims=True)

        return finish(request, facts, map_leading(one, problem, facts.sizes))


@run.defjvp
def _tangents(plain: Run, primals: Any, tangents: Any) -> Any:
    return jax.jvp(plain, primals, tangents)
