"""Attention of a single query on a CPU, as in a decoding step: keys and values are not copied.

    logits = K Q,   out = diagonal blocks of softmax(logits)ᵀ V

A product with the head axis in the middle copies all keys and values on a CPU, which takes longer
than the arithmetic of a single query. Here `K [S, K·H]` keeps its layout and the queries form a
block-diagonal matrix `Q [K·H, N]`: K times the FLOPs, and no copy.

Multiplied by the zeros of Q a non-finite number would affect other heads. A zero column appended to
each second factor detects this: its product is NaN if any number is not finite. Then non-finite
numbers are replaced by 0, with the same products, so that all other outputs are bitwise equal. Only
if one of those numbers is visible, the outputs that it makes NaN are computed head by head.
Derivatives are those of the computation head by head.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import (
    NEG_INF,
    matmul,
    precision_of_products,
    same_dtype,
)
from attention_jax._core.user_code import holds_user_code
from attention_jax.kernels import tiling as tilings
from attention_jax.kernels.block import entropy_of
from attention_jax.kernels.online_softmax import attend_head, attend_heads
from attention_jax.kernels.problem import Static, finish, may_exceed_int32
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling, plane_view, whole_plane
from attention_jax.scores.similarity import Dot, ScaledDot
from attention_jax.softmax import log_sum_exp

DERIVATIVES = ("jvp", "vjp", "any nesting")

# Beyond this number of key/value heads the extra FLOPs cost more than the copy.
_MOST_HEADS = 16


def why_not(request: Request) -> str | None:
    """Why this kernel cannot run the request on this machine, or None."""
    layout = request.layout
    if not tilings.on_one_cpu():
        return "it runs on a single CPU device: elsewhere heads may be sharded, or keys not copied"
    if layout.symbolic_lengths:
        return f"it needs known lengths, got symbolic {layout.symbolic_lengths}"
    if layout.T != 1:
        return f"it needs T = 1, got T = {layout.T}"
    if layout.K > _MOST_HEADS:
        return f"K must be at most {_MOST_HEADS}, got K = {layout.K}"
    if 0 in (layout.H, layout.V):
        return f"it needs H > 0 and V > 0, got H = {layout.H} and V = {layout.V}"
    if type(request.score) not in (Dot, ScaledDot):
        return f"score {request.score!r} is not a dot product, scaled or not"
    for name in ("bias", "block_size"):
        if getattr(request, name) is not None:
            return f"it does not support {name}"
    if request.dropout_rate > 0:
        return "it has no dropout"
    if holds_user_code(request.mask):  # the derivative's rule would call it again
        return f"mask {request.mask!r} contains a user function"
    for name in ("query_positions", "key_positions"):
        positions = getattr(request, name)
        if positions is not None and may_exceed_int32(positions.dtype):
            return f"{name} must be of at most 32 bits, got {positions.dtype}"
    return None


def tile(request: Request) -> Tiling:
    """All keys in one block, heads vectorised."""
    return whole_plane(request, loop=False)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def run(request: Request, tiling: Tiling) -> Result:
    """Computes the request."""
    shapes = jax.eval_shape(_block_diagonal, request)

    def nothing() -> tuple[Result, Array]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # A separate branch: otherwise XLA fuses the reshape with the preceding write of the newest
    # token, which is then done twice, once in a copy of the cache.
    able = jnp.all(jnp.isfinite(request.query))
    result, finite = jax.lax.cond(able, lambda: _block_diagonal(request), nothing)

    def with_replaced() -> Result:
        cleaned, matters = _cleaned(request)
        clean = _block_diagonal(cleaned)[0]

        def with_nans() -> Result:
            exact = _head_by_head(request, tiling)
            return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(x), y, x), exact, clean)

        return jax.lax.cond(matters, with_nans, lambda: clean)

    return jax.lax.cond(finite, lambda: result, with_replaced)


@run.defjvp
def _run_jvp(tiling: Tiling, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda request: _head_by_head(request, tiling), primals, tangents)


def _head_by_head(request: Request, tiling: Tiling) -> Result:
    """The same result by the online softmax."""
    return attend_heads(request, tiling, attend_head)


def _block_diagonal(request: Request) -> tuple[Result, Array]:
    """The result, and whether its keys and values are finite."""
    with precision_of_products(request.precision):
        return _products(request)


def _products(request: Request) -> tuple[Result, Array]:
    layout = request.layout
    K, G, S, H, V = layout.K, layout.group, layout.S, layout.H, layout.V
    examples, N = math.prod(layout.batch), layout.N
    query, key = same_dtype(request.query, request.key)
    value = jnp.asarray(request.value).reshape(examples, S, K * V)
    dtype = request.accumulator
    query = query.reshape(examples, K, G, H)
    eye = jnp.eye(K, dtype=bool)[None, :, None, :, None]
    columns = jnp.where(eye, jnp.swapaxes(query, 2, 3)[:, :, :, None], jnp.zeros((), query.dtype))
    scores = _beside_zeros(matmul, key.reshape(examples, S, K * H), columns.reshape(-1, K * H, N))
    logits = scores[..., :N].astype(dtype) * _scale(request, dtype)
    visible, overflowed = _visible(request)
    lse, weights = log_sum_exp(logits, visible, axis=-2)
    products = _beside_zeros(matmul, jnp.swapaxes(value, 1, 2), weights)
    blocks = products[..., :N].reshape(examples, K, V, K, G)
    out = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)  # [B, K, V, G]
    nans = jnp.any(jnp.isnan(scores[..., N])) | jnp.any(jnp.isnan(products[..., N]))
    finite = ~overflowed & ~nans
    shown = logits if visible is None else jnp.where(visible, logits, NEG_INF)
    entropy = entropy_of(weights, axis=-2)
    facts = Static(layout, (), False, False, 0.0, request.statistics, dtype)
    out = jnp.swapaxes(out, -2, -1).astype(dtype)
    return finish(request, facts, out, lse, entropy, jnp.max(shown, axis=-2)), finite


def _cleaned(request: Request) -> tuple[Request, Array]:
    """The request with 0 for non-finite numbers, and whether any of these is visible."""
    layout = request.layout
    query, key, value = (jnp.asarray(x) for x in (request.query, request.key, request.value))
    good = [jnp.isfinite(x) for x in (key, value, query)]
    bad = ~(jnp.all(good[0], axis=(-2, -1)) & jnp.all(good[1], axis=(-2, -1)))  # [*B, S]
    visible, overflowed = _visible(request)
    by_any_head = True if visible is None else jnp.any(visible, axis=-1)
    matters = jnp.any(bad.reshape(-1, layout.S) & by_any_head)
    matters = matters | overflowed | ~jnp.all(good[2])
    key, value, query = (
        jnp.where(finite, x, jnp.zeros((), x.dtype))
        for finite, x in zip(good, (key, value, query), strict=True)
    )
    return dataclasses.replace(request, query=query, key=key, value=value), matters


def _beside_zeros(product: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """`product(x, y)` of `y [B, rows, N]` with a column of zeros appended."""
    return product(x, jnp.concatenate([y, jnp.zeros((*y.shape[:-1], 1), y.dtype)], axis=-1))


def _scale(request: Request, dtype: Any) -> Array:
    """The score's factor, a scalar or `[N]`, as `[1, 1, #N]`."""
    score, factor = request.score, 1.0
    if isinstance(score, ScaledDot):
        constant = score.static_scale(request.layout.H)
        factor = score.scale if constant is None else constant
    return jnp.asarray(factor).astype(dtype).reshape(1, 1, -1)


def _visible(request: Request) -> tuple[Array | None, Array]:
    """The visible keys of each head, `[#B, S, #N]`, and whether any example's output is NaN."""
    mask, layout = request.mask, request.layout
    if mask is None:
        return None, jnp.zeros((), bool)
    pairs = jnp.asarray(mask.allowed(plane_view(request)), bool)[..., 0, :]
    pairs = pairs.reshape((1,) * (len(layout.batch) + 2 - pairs.ndim) + pairs.shape)
    pairs = jnp.broadcast_to(pairs, (*layout.batch, pairs.shape[-2], layout.S))
    pairs = pairs.reshape(-1, *pairs.shape[-2:])
    examples = mask.overflowed()
    overflowed = jnp.zeros((), bool) if examples is None else jnp.any(examples)
    return jnp.swapaxes(pairs, -2, -1), overflowed
