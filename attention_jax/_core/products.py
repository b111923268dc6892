"""The two matrix products of attention, with derivatives that suit a CPU.

    e = q kᵀ        de = dq kᵀ + q dkᵀ
    o = w v         do = dw v + w dv

In reverse mode the gradients of keys and values are products with a transposed plane, `deᵀ q` and
`wᵀ do`, and XLA's products on a CPU take twice as long if the large factor is transposed. So the
small factors are transposed instead: `(qᵀ de)ᵀ` and `(doᵀ w)ᵀ`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention_jax._core.axes import Array
from attention_jax._core.numerics import current_precision, matmul, precision_of_products

Product = Callable[[Array, Array], Array]

# With fewer rows or columns the transposition costs more than it saves.
_LEAST_ROWS = 512


def product_by_key(query: Array, d_key: Array) -> Array:
    """`q dkᵀ`, `[Tb, H], [Sb, H] -> [Tb, Sb]`; its transpose in dk transposes no plane."""
    if not _is_large(query.shape[0], d_key.shape[0]):
        return matmul(query, d_key.T)
    return matmul(_laid_out_transposed(query), _laid_out_transposed(d_key).T)


def product_by_value(weights: Array, d_value: Array) -> Array:
    """`w dv`, `[Tb, Sb], [Sb, V] -> [Tb, V]`; its transpose in dv transposes no plane."""
    if not _is_large(*weights.shape):
        return matmul(weights, d_value)
    return _laid_out_transposed(matmul(weights, _laid_out_transposed(d_value)))


def _is_large(rows: int, columns: int) -> bool:
    if any(map(jax.export.is_symbolic_dim, (rows, columns))):
        return False
    return jax.default_backend() == "cpu" and min(rows, columns) >= _LEAST_ROWS


def _laid_out_transposed(x: Array) -> Array:
    """`x` in the memory layout of its transpose; without the barrier XLA reorders the product."""
    return jax.lax.optimization_barrier(x.T).T


def _bilinear(product: Product, by_second: Product) -> Callable[..., Array]:
    """A product as a function of a precision and its factors; `by_second` is its second tangent."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(precision: Any, x: Array, y: Array) -> Array:
        with precision_of_products(precision):
            return product(x, y)

    def rule(precision: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
        (x, y), (dx, dy) = primals, tangents
        out = function(precision, x, y)
        d_out = None if isinstance(dx, SymbolicZero) else function(precision, dx, y)
        if not isinstance(dy, SymbolicZero):
            with precision_of_products(precision):
                change = by_second(x, dy)
            d_out = change if d_out is None else d_out + change
        return out, jnp.zeros_like(out) if d_out is None else d_out

    function.defjvp(rule, symbolic_zeros=True)
    return function


_pairs = _bilinear(lambda query, key: matmul(query, key.T), product_by_key)
_weighted = _bilinear(matmul, product_by_value)


def pair_products(query: Array, key: Array) -> Array:
    """`q kᵀ` of a block, `[Tb, H], [Sb, H] -> [Tb, Sb]`, in float32 at least."""
    return _pairs(current_precision(), query, key)


def weighted_sum(weights: Array, value: Array) -> Array:
    """`w v` of a block, `[Tb, Sb], [Sb, V] -> [Tb, V]`, in float32 at least."""
    return _weighted(current_precision(), weights, value)
