"""cuDNN's fused attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`.

    out = softmax(scale · q kᵀ, where s <= t and t - s <= left and s < length) · v

It supports requests whose parts all have the same meaning in `jax.nn`, which defines windows as
this library does and aligns causal masks at the start. Only first derivatives, in reverse mode.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tile
from attention_jax.kernels.vendor import Plain, guarded, translate

__all__ = ["DERIVATIVES", "cannot", "run", "tile", "why_not"]

DERIVATIVES = ("vjp",)


def why_not(request: Request) -> str | None:
    """Why it cannot run the request on this machine, or None."""
    if jax.default_backend() != "gpu":
        return f"it runs on NVIDIA GPUs, and JAX's default backend is {jax.default_backend()!r}"
    capability = getattr(jax.devices("gpu")[0], "compute_capability", None)
    if capability is None or float(capability) < 8:
        return f"it needs compute capability 8.0 (Ampere), this GPU has {capability}"
    return cannot(request, deepest=256 if float(capability) >= 9 else 128)


def cannot(request: Request, *, deepest: int) -> str | None:
    """Why it cannot run the request on a GPU that supports heads of depth up to `deepest`."""
    layout = request.layout
    if layout.symbolic_lengths:
        return f"it needs known lengths, got symbolic {layout.symbolic_lengths}"
    dtypes = {np.dtype(x.dtype).name for x in (request.query, request.key, request.value)}
    if len(dtypes) > 1 or not dtypes <= {"float16", "bfloat16"}:
        return f"query, key and value must all be float16 or all bfloat16, got {sorted(dtypes)}"
    if layout.H != layout.V:
        return f"it needs V = H, got V = {layout.V} and H = {layout.H}"
    if layout.H % 8 or layout.H > deepest:
        return f"H must be a multiple of 8, at most {deepest}, got {layout.H}"
    plain = translate(request)
    if isinstance(plain, str):
        return plain
    if plain.cap is not None:
        return f"a soft cap ({plain.cap}) is not expressible"
    if plain.segments is not None:
        return "segment ids are not expressible"
    if plain.right not in (None, 0) or (plain.left is not None and plain.right is None):
        return f"a window that extends beyond the query is not expressible, got {request.mask!r}"
    if plain.left is not None and plain.padding is not None:
        return "a window with lengths may leave rows without a key, which is undefined"
    return None


def run(request: Request, tiling: Any = None) -> Result:
    """Computes the request."""
    plain = translate(request)
    assert isinstance(plain, Plain)  # ensured by why_not
    return Result(guarded(request, plain, lambda *qkv: _attend(request, plain, *qkv)))


def _attend(request: Request, plain: Plain, query: Array, key: Array, value: Array) -> Array:
    layout = request.layout
    flat = [x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)]
    options: dict[str, Any] = {}
    if plain.left is not None:
        options["local_window_size"] = (plain.left, 0)
    if plain.padding is not None:

        def lengths(given: Any, most: int) -> Array:
            # Rows without a key are undefined there: they get one here, and are set to 0 below.
            each = jnp.clip(jnp.asarray(given).astype(jnp.int32), 1, most)
            return jnp.broadcast_to(each, layout.batch).reshape(-1)

        options["key_value_seq_lengths"] = lengths(plain.padding.key_lengths, layout.S)
        if plain.padding.query_lengths is not None:
            options["query_seq_lengths"] = lengths(plain.padding.query_lengths, layout.T)
    out = jax.nn.dot_product_attention(
        *flat,
        scale=plain.scale,
        is_causal=plain.right == 0,
        implementation="cudnn",
        **options,
    )
    return out.reshape(*layout.batch, layout.T, layout.N, layout.V)
