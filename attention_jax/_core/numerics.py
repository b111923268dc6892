"""Dtypes, accumulation and precision: numerical functions that every part shares."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import AnyArray, Array, Shape
from attention_jax._core.mesh_axes import divide_factors

NEG_INF = float("-inf")


def promote(*dtypes: Any) -> np.dtype:
    """The common dtype by JAX's lattice, also under strict dtype promotion.

    NumPy's float64 counts as float32 unless 64 bits are on, without a warning. Floats of 8 bits and
    fewer, which JAX promotes to nothing, count as float32.
    """

    def known(dtype: Any) -> Any:
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        return np.dtype(np.float32) if _is_float8(dtype) else dtype

    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*map(known, dtypes)))


def _is_float8(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 16


def without_float8(x: Any) -> Any:
    """An array, or its shape, in float32 if its floats have 8 bits or fewer."""
    if not _is_float8(x.dtype):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, jnp.float32)
    return jnp.asarray(x).astype(jnp.float32)


def zeros(shape: Shape, dtype: Any) -> Array:
    """`jnp.zeros` of the dtype that JAX gives an array of this one."""
    return jnp.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))


def arange(size: Any) -> Any:
    """0 .. size - 1, int32: a NumPy array, or a traced one if the size is symbolic."""
    xp: Any = jnp if jax.export.is_symbolic_dim(size) else np
    return xp.arange(size, dtype=np.int32)


def stats_dtype(*dtypes: Any) -> np.dtype:
    """The dtype of softmax statistics and accumulators: float32 at least, float64 for float64."""
    if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return np.dtype(np.float32)  # at once, because every call of `attend` reads it
    return promote(jnp.float32, *dtypes)


def lowest(dtype: Any) -> float:
    """The least finite number of a floating dtype."""
    return float(jnp.finfo(dtype).min)


def is_low_precision(dtype: Any) -> bool:
    """Whether a floating dtype has fewer than 32 bits."""
    return jnp.finfo(dtype).bits < 32


def is_floating(x: Any) -> bool:
    """Whether an array has a floating dtype."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def widen(x: AnyArray) -> Array:
    """`x` in float32, or in float64 if it already is."""
    return jnp.asarray(x).astype(stats_dtype(x.dtype))


def widen_low(tree: Any) -> Any:
    """The tree, its floating leaves of fewer than 32 bits in float32."""

    def one(x: Any) -> Any:
        return widen(x) if is_floating(x) else x

    return jax.tree.map(one, tree)


def through_float32(copy: Callable[[Array], Array], x: AnyArray) -> Array:
    """`copy(x)`, a broadcast or a gather, whose transpose sums in at least float32."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) and is_low_precision(x.dtype)):
        return copy(jnp.asarray(x))
    return copy(widen(x)).astype(x.dtype)


def same_dtype(*arrays: AnyArray) -> tuple[Array, ...]:
    """The arrays, cast to their common dtype."""
    dtype = promote(*(x.dtype for x in arrays))
    return tuple(jnp.asarray(x).astype(dtype) for x in arrays)


def matmul(x: AnyArray, y: AnyArray) -> Array:
    """`x @ y` over the last axes, accumulated and returned in float32 at least.

    No product of low-precision numbers is rounded back to low precision, so a float16 logit
    beyond 65504 stays finite.
    """
    x, y = divide_factors(*same_dtype(x, y))
    return jnp.matmul(x, y, preferred_element_type=stats_dtype(x.dtype))


def safe_normalize(x: AnyArray) -> Array:
    """`x / |x|` along the last axis, 0 with gradient 0 where x is 0."""
    x = widen(x)
    # Squares of a row's numbers stay in range when its largest is 1; the direction is the same.
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0))
    x = x / jnp.where(largest > 0, largest, 1)
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    return jnp.where(positive, x * jax.lax.rsqrt(jnp.where(positive, square, 1)), 0)


def is_concrete(*trees: Any) -> bool:
    """Whether no leaf of the trees is a tracer, so that their values are known."""
    return not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees))


def infs_are_errors() -> bool:
    """Whether `jax_debug_infs` is on."""
    return bool(jax.config.jax_debug_infs)  # type: ignore[attr-defined]


@contextlib.contextmanager
def precision_of_products(precision: Any) -> Iterator[None]:
    """Matrix products inside have this precision: None, a name or a `jax.lax.Precision`."""
    if precision is None:
        yield
        return
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    with jax.default_matmul_precision(name):
        yield


def current_precision() -> Any:
    """The argument of `precision_of_products` that restores the current precision.

    For derivative rules: JAX runs them when it differentiates, and no longer where they are called.
    """
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
