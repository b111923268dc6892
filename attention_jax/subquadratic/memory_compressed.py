"""Memory-compressed attention: runs of keys and values, each compressed to one."""

import functools
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, MaskLike, Query, Value
from attention_jax._core.checks import as_array, check_count
from attention_jax._core.compiled import compiled
from attention_jax.masks.mask import Mask
from attention_jax.subquadratic.few import attend_to_few, projection, scaled
from attention_jax.subquadratic.problem import (
    NEVER,
    canonical,
    empty_output,
    finish,
    non_finite_rows,
    over_groups,
)
from attention_jax.subquadratic.visibility import mask_object


def memory_compressed_attention(
    query: Query,
    key: Key,
    value: Value,
    stride: int,
    *,
    key_kernel: Annotated[Any, Float[Array, "*#K stride H H"]] | None = None,
    value_kernel: Annotated[Any, Float[Array, "*#K stride V V"]] | None = None,
    mask: Mask | MaskLike | None = None,
    scale: Any = None,
) -> Float[Array, "*B T N V"]:
    """Memory-compressed attention: one key and value per run of `stride`, O(T·S / stride).

        k'_j = mean of the run's keys,  or  Σ_i k_{stride·j + i} W_i;   out = softmax(q · k') v'

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        stride: length of a run, at least 1; the last one may be shorter.
        key_kernel: W of a strided convolution, `[stride, H, H]` or `[K, stride, H, H]`; None takes
            the mean.
        value_kernel: likewise, `[stride, V, V]` or `[K, stride, V, V]`; both kernels or neither.
        mask: causal order and padding, as in `linear_attention`. Masked keys are excluded from
            their run: the mean is over the other keys, and the convolution's input is 0 there. A
            run is visible to a query if all its unmasked keys are; a run of masked keys is
            masked. With `causal()` the first `stride - 1` queries are empty rows.
        scale: factor of the scores, a number, a scalar array or `[N]`; None is 1/√H.

    Returns:
        `[*B, T, N, V]` with the query's dtype; 0 for empty rows.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, one kernel without the other, or a mask other than
            causal order and padding.

    Example:
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jnp.ones((2, 40, 4, 8))
        >>> out = aj.subquadratic.memory_compressed_attention(x, x, x, 3, mask=aj.masks.causal())
        >>> out[0, :4, 0, 0].tolist()
        [0.0, 0.0, 1.0, 1.0]

    References:
        Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198,
        §4.2.3 (convolution, stride 3).
    """
    mask = mask_object(mask)
    stride = check_count("stride", stride, 1)
    if (key_kernel is None) != (value_kernel is None):
        raise ValueError("key_kernel and value_kernel must be given together: give both or neither")
    arrays = (as_array(*pair) for pair in (("query", query), ("key", key), ("value", value)))
    return _run(*arrays, key_kernel, value_kernel, mask, scale, stride)


@functools.partial(compiled, static=(7,))
def _run(
    query: Any,
    key: Any,
    value: Any,
    key_kernel: Any,
    value_kernel: Any,
    mask: Any,
    scale: Any,
    stride: int,
) -> Array:
    problem = canonical("memory_compressed_attention", query, key, value, mask)
    layout = problem.layout
    kernels: list[Any] = [key_kernel, value_kernel]
    if key_kernel is not None:
        for i, (name, letter, size) in enumerate(
            (("key_kernel", "H", layout.H), ("value_kernel", "V", layout.V))
        ):
            letters, sizes = f"stride, {letter}, {letter}", (stride, size, size)
            kernel = projection(name, kernels[i], letters, sizes, layout.K)
            kernels[i] = over_groups(kernel[None], problem.kv_heads)[0]
    empty = empty_output(problem)
    if empty is not None:
        return empty
    seen = problem.key_mask
    if seen is None:
        seen = jnp.ones((1, 1, layout.S), bool)
    members = _runs(seen, stride, axis=2)
    index = np.arange(members.shape[2] * stride, dtype=np.int32).reshape(1, 1, -1, stride)
    last = jnp.max(jnp.where(members, index, -1), axis=-1)
    few_since = jnp.where(last < 0, NEVER, last)
    if problem.mask.offset is None:
        few_since = jnp.where(last < 0, NEVER, 0)
    few_keys, few_values = (
        _compress(jnp.where(seen[..., None], x, 0), members, kernel, stride)
        for x, kernel in zip((problem.key, problem.value), kernels, strict=True)
    )
    queries = scaled(problem.query, scale)
    out, nonempty = attend_to_few(queries, few_keys, few_values, few_since, problem.reach)
    if key_kernel is not None:  # the convolution mixes channels
        any_bad = jnp.any(problem.bad_value, axis=-1, keepdims=True)
        problem = problem._replace(bad_value=jnp.broadcast_to(any_bad, problem.bad_value.shape))
    since = jnp.repeat(few_since, stride, axis=2)[:, :, : layout.S]
    return finish(problem, out, non_finite_rows(problem, since), nonempty)


def _runs(x: Array, stride: int, axis: int) -> Array:
    """Splits the axis into runs of `stride`, zero-padded at the end."""
    widths = [(0, -x.shape[axis] % stride if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, widths)
    return x.reshape(*x.shape[:axis], -1, stride, *x.shape[axis + 1 :])


def _compress(x: Array, members: Array, kernel: Any, stride: int) -> Array:
    """The mean or convolution of each run, `[B, K, S, H]` to `[B, K, M, H]`."""
    runs = _runs(x, stride, axis=2)
    if kernel is None:
        count = jnp.maximum(jnp.sum(members, axis=-1), 1).astype(x.dtype)
        return jnp.sum(runs, axis=3) / count[..., None]
    kernel = kernel.astype(x.dtype)
    if kernel.shape[0] == 1:
        return jnp.einsum("bkmih,ihx->bkmx", runs, kernel[0])
    return jnp.einsum("bkmih,kihx->bkmx", runs, kernel)
