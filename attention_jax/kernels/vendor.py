"""Translation of requests for vendors' kernels, and the handling of masked non-finite values.

They support one score, the dot product with a constant scale, and masks that are an interval of
keys for each query, sometimes with lengths or segment ids. `translate` converts a request, or
returns the part that is not expressible. The kernels multiply a masked NaN by 0, and their result
for an empty row is undefined: `guarded` removes both from their inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array, Layout
from attention_jax._core.batched_predicates import one_for_all
from attention_jax.kernels.request import Request
from attention_jax.masks.mask import Lengths, Mask, SegmentIds, SequenceLengths

_ROWS = 128  # queries of one step if a key is not finite


class Plain(NamedTuple):
    """A request in the vendors' terms.

    Attributes:
        scale: the factor of the dot product.
        cap: the soft cap, or None.
        left: keys from t - left on are visible to query t; None is no bound.
        right: keys up to t + right are visible, possibly right < 0; None is no bound.
        padding: lengths, or None.
        segments: ids, or None.
    """

    scale: float
    cap: float | None
    left: int | None
    right: int | None
    padding: SequenceLengths | None
    segments: SegmentIds | None


def translate(request: Request) -> Plain | str:
    """The request in the vendors' terms, or the reason why it is not expressible."""
    product = request.score.dot_product(request.layout.H)
    if product is None:
        return f"score {request.score!r} is not a dot product with a constant scale"
    if request.bias is not None:
        return f"bias {request.bias!r} may mask whole rows, for which it returns NaN"
    if request.dropout_rate > 0:
        return "its dropout mask is not a function of (key, head, positions)"
    if request.statistics:
        return "its statistics have no gradient, or are missing"
    if request.query_positions is not None or request.key_positions is not None:
        return "it does not support query_positions or key_positions"
    if request.precision is not None:
        return f"precision {request.precision!r} is not supported"
    if request.block_size is not None:
        return "it does not support block_size"
    interval = _mask(request.mask, request.layout)
    return interval if isinstance(interval, str) else Plain(*product, *interval)


def _mask(
    mask: Mask | None, layout: Layout
) -> tuple[int | None, int | None, SequenceLengths | None, SegmentIds | None] | str:
    left = right = padding = segments = None

    def tighter(old: int | None, new: int | None) -> int | None:
        return new if old is None else old if new is None else min(old, new)

    lengths = Lengths(layout.T, layout.S, lead=(*layout.batch, layout.N))
    for part in () if mask is None else mask.conjuncts():
        if (band := part.band(lengths)) is not None:
            left, right = tighter(left, band.left), tighter(right, band.right)
        elif padding is None and (given := part.sequence_lengths()) is not None:
            padding = given
        elif segments is None and (ids := part.segment_ids()) is not None:
            segments = ids
        else:
            return f"mask {part!r} is not expressible"
    if right is not None and right < 0:
        return f"mask {mask!r} leaves {-right} first queries without a key, which is undefined"
    if left is not None and layout.T - 1 - left > layout.S - 1:
        empty = layout.T - layout.S - left
        return f"mask {mask!r} leaves {empty} last queries without a key, which is undefined"
    return left, right, padding, segments


def guarded(
    request: Request, plain: Plain, kernel: Callable[[Array, Array, Array], Array]
) -> Array:
    """Runs a kernel on finite inputs, so that masked NaN and inf have no effect.

    Args:
        request: the request.
        plain: its translation.
        kernel: from finite query, key and value to out `[*B, T, N, V]`.

    Returns:
        `[*B, T, N, V]`: 0 for empty rows, and NaN exactly where a visible number is not finite.
    """
    query, key, value = (jnp.asarray(x) for x in (request.query, request.key, request.value))
    finite = [jnp.isfinite(x) for x in (query, key, value)]
    zero = jnp.zeros((), query.dtype)
    clean = (jnp.where(f, x, zero) for f, x in zip(finite, (query, key, value), strict=True))
    out = kernel(*clean)
    bad = jnp.any(~finite[1], axis=-1, keepdims=True) | ~finite[2]
    is_nan = jax.lax.cond(
        _any_of_all(jnp.any(bad)),
        lambda: _visible_bad(plain, request.layout, bad),
        lambda: jnp.zeros(out.shape, bool),
    )
    is_nan = is_nan | ~jnp.all(finite[0], axis=-1, keepdims=True)
    out = jnp.where(is_nan, jnp.asarray(jnp.nan, out.dtype), out)
    with_keys = _rows_with_keys(plain, request.layout)
    return out if with_keys is None else jnp.where(with_keys[..., None, None], out, zero)


_any_of_all = one_for_all(lambda flags: jnp.any(flags, 0))


def _visible_bad(plain: Plain, layout: Layout, bad: Array) -> Array:
    """The outputs with a visible bad entry, `[*B, T, N, V]`; `bad` is `[*B, S, K, V]`.

    Processes a few queries per step, for O(T + S) memory; runs only if an entry is bad.
    """
    count = -(-layout.T // _ROWS)
    bad = jnp.repeat(bad, layout.group, axis=-2).astype(jnp.float32)

    def some(i: Array) -> Array:
        rows = jnp.minimum(i * _ROWS + jnp.arange(_ROWS, dtype=jnp.int32), layout.T - 1)
        visible = _visible(plain, layout, rows).astype(jnp.float32)
        return jnp.einsum("...ts,...snv->...tnv", visible, bad) > 0

    parts = jnp.moveaxis(jax.lax.map(some, jnp.arange(count, dtype=jnp.int32)), 0, -4)
    joined = parts.reshape(*layout.batch, count * _ROWS, layout.N, layout.V)
    return joined[..., : layout.T, :, :]


def _visible(plain: Plain, layout: Layout, rows: Array) -> Array:
    """The keys visible to the given queries, bool `[*B, rows, S]`."""
    keys = jnp.arange(layout.S, dtype=jnp.int32)
    distance = keys[None, :] - rows[:, None]
    visible = jnp.ones(distance.shape, bool)
    if plain.left is not None:
        visible = visible & (distance >= -plain.left)
    if plain.right is not None:
        visible = visible & (distance <= plain.right)
    visible = jnp.broadcast_to(visible, (*layout.batch, *visible.shape))
    if plain.padding is not None:
        lengths = jnp.asarray(plain.padding.key_lengths)
        visible = visible & (keys < lengths[..., None, None])
    if plain.segments is not None:
        query_ids, key_ids = segment_ids(plain.segments, layout)
        visible = visible & (query_ids[..., rows, None] == key_ids[..., None, :])
    return visible


def segment_ids(segments: SegmentIds, layout: Layout) -> tuple[Array, Array]:
    """Ids of queries and keys, `[*B, T]` and `[*B, S]`."""
    query_ids = jnp.asarray(segments.query_ids)
    key_ids = query_ids if segments.key_ids is None else jnp.asarray(segments.key_ids)
    return (
        jnp.broadcast_to(query_ids, (*layout.batch, layout.T)).astype(jnp.int32),
        jnp.broadcast_to(key_ids, (*layout.batch, layout.S)).astype(jnp.int32),
    )


def _rows_with_keys(plain: Plain, layout: Layout) -> Array | None:
    """The queries with a visible key, by the lengths, bool `[*B, T]`; None without lengths."""
    if plain.padding is None:
        return None
    visible = jnp.asarray(plain.padding.key_lengths)[..., None] > 0
    if plain.padding.query_lengths is not None:
        rows = jnp.arange(layout.T, dtype=jnp.int32)
        visible = visible & (rows < jnp.asarray(plain.padding.query_lengths)[..., None])
    return jnp.broadcast_to(visible, (*layout.batch, layout.T))
