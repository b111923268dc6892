"""Dense attention: the reference implementation.

    out = softmax(score(q, k) + bias, where mask) · v

One block, the whole plane: O(T·S) memory, no tiling. Every other kernel is tested against this one,
and this one against the float64 reference.
"""

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.leading_axes import map_leading
from attention_jax._core.numerics import precision_of_products
from attention_jax.kernels.block import block_logits, entropy_of, weigh_values
from attention_jax.kernels.problem import Problem, finish, lower
from attention_jax.kernels.request import Request, Result
from attention_jax.softmax import log_sum_exp

DERIVATIVES = ("jvp", "vjp", "any nesting")


def why_not(request: Request) -> str | None:
    """Why this kernel cannot run the request, or None."""
    if request.block_size is not None:
        return "dense attention is one block and takes no block_size"
    return None


def tile(request: Request) -> None:
    """None: one block, all pairs."""


def run(request: Request, tiling: None = None) -> Result:
    """Computes the request."""
    with precision_of_products(request.precision):
        problem, facts = lower(request, merge=False)

        def one(head: Problem) -> tuple[Array, Array, Array, Array]:
            logits = block_logits(head, facts, partial=True)
            lse, weights = log_sum_exp(logits, None)
            out = weigh_values(head, facts, weights, logits)
            entropy = entropy_of(weights)
            first = jnp.argmax(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
            top = jnp.take_along_axis(logits, first, axis=-1)[:, 0]
            return out, lse, entropy, top

        return finish(request, facts, *map_leading(one, problem, facts.sizes))


def weights(request: Request) -> Array:
    """The weights before dropout, `[*B, N, T, S]`, with the query's dtype."""
    with precision_of_products(request.precision):
        problem, facts = lower(request, merge=False)

        def one(head: Problem) -> Array:
            logits = block_logits(head, facts, partial=True)
            return log_sum_exp(logits, None)[1]

        layout = facts.layout
        shape = (*layout.batch, layout.N, layout.T, layout.S)
        return map_leading(one, problem, facts.sizes).reshape(shape).astype(request.query.dtype)
