"""Checks of a caller's arguments: one clear error that names the argument and the numbers.

They are explicit code: chex's assertions, which can be switched off, check only shapes that the
library's own functions must return.
"""

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import AnyArray, Layout, Shape
from attention_jax._core.numerics import is_concrete, precision_of_products
from attention_jax._core.term import Sides


def as_array(name: str, x: Any) -> Any:
    """Returns `x` if it is an array or its shape; else raises a TypeError."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    return x


def check_floating(name: str, x: Any) -> None:
    """A TypeError unless `x` has a real floating dtype."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got dtype {np.dtype(x.dtype).name}")


def check_dtype(name: str, dtype: Any) -> np.dtype:
    """The dtype that JAX makes of `dtype`; a TypeError unless it is a real floating one."""
    try:
        known = None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        known = None
    if known is None:
        raise TypeError(f"{name} must be a floating dtype, got {dtype!r}")
    if not jnp.issubdtype(known, jnp.floating):
        raise TypeError(f"{name} must be floating, got {np.dtype(known).name}")
    return np.dtype(known)


def check_parameter(name: str, x: Any) -> None:
    """A TypeError unless `x` is an array or a plain number."""
    number = isinstance(x, (int, float, np.number)) and not isinstance(x, bool)
    if not number and not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array or a number, got {type(x).__name__}")


def check_number(name: str, x: Any) -> float:
    """`x` as a float; a TypeError unless it is a scalar known while tracing."""
    check_parameter(name, x)
    if np.ndim(x) or not is_concrete(x):
        shown = f"shape {list(np.shape(x))}" if np.ndim(x) else "a traced array"
        raise TypeError(f"{name} must be a plain number, got {shown}")
    return float(x)


def check_positive(name: str, x: Any) -> float:
    """`x` as a float; an error unless it is a known, positive and finite scalar."""
    x = check_number(name, x)
    if not x > 0:
        raise ValueError(f"{name} must be positive, got {x:g}")
    if not np.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return x


def check_callable(name: str, x: Any) -> None:
    """A TypeError unless `x` can be called."""
    if not callable(x):
        raise TypeError(f"{name} must be a function, got {type(x).__name__}")


def check_key(name: str, x: Any) -> None:
    """An error unless `x` is one PRNG key, of `jax.random.key` or `jax.random.PRNGKey`."""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", ())
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed or dtype == np.uint32):
        got = type(x).__name__ if dtype is None else f"dtype {dtype}"
        raise TypeError(f"{name} must be one PRNG key, as jax.random.key(0) is, got {got}")
    if len(shape) != (0 if typed else 1):
        raise ValueError(f"{name} must be one PRNG key, got keys of shape {list(shape)}")


def check_precision(precision: Any) -> None:
    """Raises an error unless it is a precision of matrix products in JAX."""
    try:
        with precision_of_products(precision):
            pass
    except (TypeError, ValueError) as error:
        raise ValueError(
            "precision must be None, a jax.lax.Precision or one of JAX's names for it, such as "
            f"'highest', got {precision!r}"
        ) from error


def check_inputs(query: Any, key: Any, value: Any | None = None) -> Layout:
    """Checks `query [*B, T, N, H]`, `key [*B, S, K, Hk]`, `value [*B, S, K, V]`; returns the sizes.

    Whether H and Hk must agree is the score's business.

    Raises:
        TypeError: an argument is not a floating array.
        ValueError: ranks or sizes do not fit.
    """
    arrays = {"query": (query, "*B T N H"), "key": (key, "*B S K Hk")}
    if value is not None:
        arrays["value"] = (value, "*B S K V")
    for name, (x, letters) in arrays.items():
        as_array(name, x)
        check_floating(name, x)
        if x.ndim < 3:
            raise ValueError(f"{name} must be [{', '.join(letters.split())}], got {list(x.shape)}")
    *batch, T, N, H = query.shape
    *_, S, K, Hk = key.shape
    if mismatch := _mismatch(arrays):
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, (x, _) in arrays.items())
        raise ValueError(f"{mismatch}: got {shapes}")
    if K == 0 or N % K:
        raise ValueError(
            f"query heads (N = {N}) must be a multiple of key/value heads (K = {K}): "
            f"query {list(query.shape)}, key {list(key.shape)}"
        )
    return Layout(tuple(batch), T, S, N, K, H, Hk, value.shape[-1] if value is not None else 0)


def _mismatch(arrays: dict[str, tuple[Any, str]]) -> str | None:
    """The axes of query, key and value that differ but must agree; None if there are none."""
    query, key = arrays["query"][0], arrays["key"][0]
    for name in ("key", "value"):
        if name in arrays and arrays[name][0].shape[:-3] != query.shape[:-3]:
            return f"query and {name} must have the same batch axes *B"
    value = arrays["value"][0] if "value" in arrays else key
    if value.shape[-3] != key.shape[-3]:
        return f"key length {key.shape[-3]} and value length {value.shape[-3]} must match (S)"
    if value.shape[-2] != key.shape[-2]:
        return f"key heads {key.shape[-2]} and value heads {value.shape[-2]} must match (K)"
    return None


def check_positions(name: str, positions: Any, batch: Shape, length: Any) -> None:
    """Positions are ints, `[length]` or `[*B, length]`."""
    as_array(name, positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {np.dtype(positions.dtype).name}")
    if tuple(positions.shape) not in ((length,), (*batch, length)):
        letter = "T" if name.startswith("query") else "S"
        raise ValueError(
            f"{name} has shape {list(positions.shape)} but must be [{letter}] = [{length}] or "
            f"[*B, {letter}] = {[*batch, length]}"
        )
    if is_concrete(positions) and not fits_int32(positions):
        raise ValueError(
            f"{name} must fit in 32 bits, got {np.min(positions)} to {np.max(positions)}"
        )


def fits_int32(x: Any) -> bool:
    """Whether all entries of a concrete array of integers, or its shape, are int32's."""
    if jnp.issubdtype(x.dtype, jnp.signedinteger) and x.dtype.itemsize <= 4:
        return True
    if x.dtype.itemsize < 4 or not hasattr(x, "__array__") or 0 in x.shape:
        return True
    low, high = int(np.min(x)), int(np.max(x))
    return np.iinfo(np.int32).min <= low and high <= np.iinfo(np.int32).max


def check_rate(name: str, rate: Any) -> float:
    """A dropout rate is a plain number in [0, 1)."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name} must be a number in [0, 1), got {type(rate).__name__}")
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {rate}")
    return float(rate)


def check_flag(name: str, value: Any) -> None:
    """A TypeError unless `value` is None or a boolean, which may be traced."""
    boolean = getattr(value, "dtype", None) == np.bool_ and np.ndim(value) == 0
    if not (value is None or isinstance(value, bool) or boolean):
        raise TypeError(f"{name} must be True, False or None, got {value!r}")


def check_size(name: str, value: Any) -> Any:
    """A size: a plain integer, at least 0, or a symbolic size of `jax.export`."""
    return value if jax.export.is_symbolic_dim(value) else check_count(name, value)


def check_known(name: str, **sizes: Any) -> None:
    """Raises a NotImplementedError if a size that the function `name` needs is symbolic."""
    symbolic = [f"{x} = {n}" for x, n in sizes.items() if jax.export.is_symbolic_dim(n)]
    if symbolic:
        raise NotImplementedError(f"{name} needs known sizes, got symbolic {', '.join(symbolic)}")


def check_count(name: str, value: Any, least: int = 0) -> int:
    """A plain integer, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_per_head(name: str, parameter: Any, letters: str, layout: Layout, *sizes: int) -> None:
    """Raises unless `parameter` is `[sizes]`, or `[N, sizes]`: one entry for each query head."""
    shape = tuple(np.shape(parameter))
    if shape not in (sizes, (layout.N, *sizes)):
        shared = f"[{letters}]" if letters else "a scalar"
        per_head = f"[N, {letters}]" if letters else "[N]"
        raise ValueError(
            f"{name} has shape {list(shape)} but must be {shared} or {per_head}, here "
            f"{list(sizes) if letters else 'a scalar'} or {[layout.N, *sizes]}"
        )


def check_pairs(name: str, array: AnyArray, layout: Layout) -> None:
    """Raises a ValueError unless `array` broadcasts to `[*B, N, T, S]`."""
    target = (*layout.batch, layout.N, layout.T, layout.S)
    shape = tuple(np.shape(array))
    padded = (1,) * (len(target) - len(shape)) + shape
    if len(padded) > len(target) or any(
        a not in (1, b) for a, b in zip(padded, target, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {list(shape)}, which does not broadcast to "
            f"[*B, N, T, S] = {list(target)}"
        )


def check_mask(data: Sides, layout: Layout) -> None:
    """Raises a ValueError unless the mask's data broadcasts to `[*B, N, T, S]`."""
    lead = (*layout.batch, layout.N)
    for side, lengths in zip(data, ((layout.T,), (layout.S,), (layout.T, layout.S)), strict=True):
        for leaf in jax.tree.leaves(side):
            target = (*lead, *lengths)
            shape = (1,) * (len(target) - leaf.ndim) + tuple(leaf.shape)
            if len(shape) != len(target) or any(
                a not in (1, b) for a, b in zip(shape, target, strict=True)
            ):
                own = list(leaf.shape[: leaf.ndim - len(lengths)])
                raise ValueError(
                    f"mask has axes {own} before its rows and columns: it does not broadcast to "
                    f"[*B, N] = {list(lead)}, T = {layout.T}, S = {layout.S}"
                )
