"""Dense attention of one query, as a step of decoding has it: the keys are read where they lie.

    logits = K Q,   out = diagonal blocks of softmax(logits)ᵀ V

A product with heads in the middle of its axes copies all keys and values on a CPU, which costs far
more than a single query's arithmetic. Here the heads of `K [S, K·H]` stay side by side and the
queries stand in a block-diagonal matrix `Q [K·H, N]`: K times the arithmetic, and no copy.

A number that is not finite would spoil its neighbours' heads through the zeros of Q. A column of
zeros, for keys, and a row of zeros, for values, turn NaN where there is one. If nobody sees it, it
is replaced and the same products give the same bits; else the plain kernel says which outputs are
spoilt, and it computes derivatives.
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
from attention_jax.kernels.block import entropy_of
from attention_jax.kernels.problem import Static, check_mask, finish, may_exceed_int32
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import on_one_cpu
from attention_jax.masks.mask import Lengths
from attention_jax.scores.similarity import Dot, ScaledDot
from attention_jax.softmax import log_sum_exp

Run = Callable[[Request], Result]
# With more heads of keys their number's worth of arithmetic costs more than the copy.
_MOST_HEADS = 16


def fits(request: Request) -> bool:
    """Whether it is one query, with a dot product that nothing is added to."""
    layout = request.layout
    return (
        layout.T == 1
        and not layout.symbolic_lengths
        and layout.K <= _MOST_HEADS
        and 0 not in (*layout.batch, layout.S, layout.H, layout.V)
        and type(request.score) in (Dot, ScaledDot)
        and request.bias is None
        and request.dropout_key is None
        and not holds_user_code(request.mask)  # which the rule would call again
        and not any(
            x is not None and may_exceed_int32(x.dtype)
            for x in (request.query_positions, request.key_positions)
        )
        and on_one_cpu()  # elsewhere the copy is not made, or heads may be divided
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def run(plain: Run, request: Request) -> Result:
    """Computes a request that `fits`; `plain` does so for any."""
    shapes = jax.eval_shape(_side_by_side, request)

    def nothing() -> tuple[Result, Array]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # A branch of its own: XLA would fuse the reshaping with the write of the newest token before
    # it, which is then done twice, once in a copy of the cache.
    able = jnp.all(jnp.isfinite(request.query))
    result, finite = jax.lax.cond(able, lambda: _side_by_side(request), nothing)

    def without_what_is_hidden() -> Result:
        # Which outputs see something is for the plain kernel to say; the numbers of all others
        # must not depend on whether one does.
        cleaned, seen = _cleaned(request)
        clean = _side_by_side(cleaned)[0]

        def spoiled() -> Result:
            spoilt = plain(request)
            return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(x), y, x), spoilt, clean)

        return jax.lax.cond(seen, spoiled, lambda: clean)

    return jax.lax.cond(finite, lambda: result, without_what_is_hidden)


@run.defjvp
def _tangents(plain: Run, primals: Any, tangents: Any) -> Any:
    return jax.jvp(plain, primals, tangents)


def _side_by_side(request: Request) -> tuple[Result, Array]:
    """The result, and whether the keys and values that it was made of are finite."""
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
    own = jnp.eye(K, dtype=bool)[None, :, None, :, None]
    columns = jnp.where(own, jnp.swapaxes(query, 2, 3)[:, :, :, None], jnp.zeros((), query.dtype))
    scores = _beside_zeros(matmul, key.reshape(examples, S, K * H), columns.reshape(-1, K * H, N))
    logits = scores[..., :N].astype(dtype) * _scale(request, dtype)
    visible, spoiled = _visible(request)
    lse, weights = log_sum_exp(logits, visible, axis=-2)
    turned = jnp.swapaxes(value, 1, 2)
    products = _beside_zeros(matmul, turned, weights)
    blocks = products[..., :N].reshape(examples, K, V, K, G)
    out = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)  # [B, K, V, G]
    nans = jnp.any(jnp.isnan(scores[..., N])) | jnp.any(jnp.isnan(products[..., N]))
    finite = ~spoiled & ~nans
    seen = logits if visible is None else jnp.where(visible, logits, NEG_INF)
    entropy = entropy_of(weights, axis=-2)
    facts = Static(layout, (), False, False, 0.0, request.statistics, dtype)
    out = jnp.swapaxes(out, -2, -1).astype(dtype)
    return finish(request, facts, out, lse, entropy, jnp.max(seen, axis=-2)), finite


def _cleaned(request: Request) -> tuple[Request, Array]:
    """The request with finite numbers, and whether somebody sees what was replaced."""
    layout = request.layout
    query, key, value = (jnp.asarray(x) for x in (request.query, request.key, request.value))
    good = [jnp.isfinite(x) for x in (key, value, query)]
    lost = ~(jnp.all(good[0], axis=(-2, -1)) & jnp.all(good[1], axis=(-2, -1)))  # [*B, S]
    visible, spoiled = _visible(request)
    looked_at = True if visible is None else jnp.any(visible, axis=-1)
    seen = jnp.any(lost.reshape(-1, layout.S) & looked_at)
    seen = seen | spoiled | ~jnp.all(good[2])
    key, value, query = (
        jnp.where(finite, x, jnp.zeros((), x.dtype))
        for finite, x in zip(good, (key, value, query), strict=True)
    )
    return dataclasses.replace(request, query=query, key=key, value=value), seen


def _beside_zeros(product: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """`product(x, y)` of `y [B, rows, N]`, with a column for zeros in the end."""
    return product(x, jnp.concatenate([y, jnp.zeros((*y.shape[:-1], 1), y.dtype)], axis=-1))


def _scale(request: Request, dtype: Any) -> Array:
    """The score's factor, a scalar or `[N]`, as `[1, 1, #N]`."""
    score, factor = request.score, 1.0
    if isinstance(score, ScaledDot):
        constant = score.static_scale(request.layout.H)
        factor = score.scale if constant is None else constant
    return jnp.asarray(factor).astype(dtype).reshape(1, 1, -1)


def _visible(request: Request) -> tuple[Array | None, Array]:
    """Which keys each head sees, `[#B, S, #N]`, and whether an example has lost data."""
    mask, layout = request.mask, request.layout
    if mask is None:
        return None, jnp.zeros((), bool)
    default = request.query_positions is None and request.key_positions is None
    check_mask(mask.prepare(Lengths(1, layout.S, default)), layout)
    positions = {"query_positions": request.query_positions, "key_positions": request.key_positions}
    pairs = jnp.asarray(mask.to_array(1, layout.S, **positions))[..., 0, :]
    if pairs.ndim == 1:
        pairs = pairs.reshape((1,) * (len(layout.batch) + 1) + pairs.shape)
    pairs = jnp.broadcast_to(pairs, (*layout.batch, *pairs.shape[-2:]))
    pairs = pairs.reshape(-1, *pairs.shape[-2:])
    spoiled = mask.spoiled()
    lost = jnp.zeros((), bool) if spoiled is None else jnp.any(spoiled)
    return jnp.swapaxes(pairs, -2, -1), lost
