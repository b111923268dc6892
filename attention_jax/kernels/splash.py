"""Splash attention, the Pallas kernel for TPUs in `jax.experimental`.

    out = softmax(cap · tanh(q kᵀ / cap), where -left <= s - t <= right and ids agree) · v

It requires scaled queries, heads before lengths and single examples, and skips the blocks that are
empty under a static mask. Only first derivatives, in reverse mode.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.numerics import widen
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tile
from attention_jax.kernels.vendor import Plain, guarded, segment_ids, translate

__all__ = ["DERIVATIVES", "cannot", "run", "tile", "why_not"]

DERIVATIVES = ("vjp",)

_LANES = 128


def why_not(request: Request) -> str | None:
    """Why it cannot run the request on this machine, or None."""
    if jax.default_backend() != "tpu":
        return f"it runs on TPUs, and JAX's default backend is {jax.default_backend()!r}"
    return cannot(request)


def cannot(request: Request) -> str | None:
    """Why it cannot run the request on a TPU, or None."""
    layout = request.layout
    if layout.symbolic_lengths:
        return f"it needs known lengths, got symbolic {layout.symbolic_lengths}"
    dtypes = {np.dtype(x.dtype).name for x in (request.query, request.key, request.value)}
    if len(dtypes) > 1 or not dtypes <= {"float32", "bfloat16"}:
        return f"query, key and value must all be float32 or all bfloat16, got {sorted(dtypes)}"
    for letter, size in (("T", layout.T), ("S", layout.S), ("H", layout.H), ("V", layout.V)):
        if size % _LANES:
            return f"{letter} must be a multiple of {_LANES}, got {size}"
    plain = translate(request)
    if isinstance(plain, str):
        return plain
    if plain.padding is not None:
        return f"lengths are not expressible, got {request.mask!r}; segments(...) are"
    segments = plain.segments
    if segments is not None and (segments.key_ids is not None or layout.T != layout.S):
        return "separate segment ids for the keys may leave rows without a key"
    if segments is not None and segments.padding_id is not None:
        return "padding_id leaves rows without a key, which is undefined"
    return None


def run(request: Request, tiling: Any = None, *, interpret: bool = False) -> Result:
    """Computes the request; with `interpret` on any machine, slowly, for tests."""
    plain = translate(request)
    assert isinstance(plain, Plain)  # ensured by why_not

    def kernel(query: Array, key: Array, value: Array) -> Array:
        return _attend(request.layout, plain, query, key, value, interpret=interpret)

    return Result(guarded(request, plain, kernel))


def _attend(
    layout: Layout, plain: Plain, query: Array, key: Array, value: Array, *, interpret: bool
) -> Array:
    # Pallas is imported here to keep `import attention_jax` fast.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        FullMask,
        LocalMask,
        MultiHeadMask,
        SegmentIds,
        make_splash_mha,
    )

    shape = (layout.T, layout.S)
    if plain.left is not None:
        mask = LocalMask(shape, (plain.left, plain.right), 0)
    elif plain.right is not None:
        mask = CausalMask(shape, offset=plain.right)
    else:
        mask = FullMask(shape)
    size = {"q": _block(layout.T), "kv": _block(layout.S)}
    kernel = make_splash_mha(
        MultiHeadMask([mask] * layout.N),
        block_sizes=BlockSizes(
            block_q=size["q"],
            block_kv=size["kv"],
            block_q_dkv=size["q"],
            block_kv_dkv=size["kv"],
            block_q_dq=size["q"],
            block_kv_dq=size["kv"],
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=plain.cap,
        interpret=interpret,
    )
    scaled = (widen(query) * plain.scale).astype(query.dtype)
    flat = (
        jnp.swapaxes(x, -2, -3).reshape(-1, x.shape[-2], x.shape[-3], x.shape[-1])
        for x in (scaled, key, value)
    )
    out: Any  # without residuals, one array
    if plain.segments is None:
        out = jax.vmap(kernel)(*flat)
    else:
        ids = (x.reshape(-1, x.shape[-1]) for x in segment_ids(plain.segments, layout))
        out = jax.vmap(lambda q, k, v, i, j: kernel(q, k, v, SegmentIds(i, j)))(*flat, *ids)
    out = out.reshape(*layout.batch, layout.N, layout.T, layout.V)
    return jnp.swapaxes(out, -2, -3)


def _block(length: int) -> int:
    """The largest block of 128, 256 or 512 that divides the length."""
    return next(size for size in (512, 256, 128) if length % size == 0)
