"""Map a function of one head of one example over the leading axes of all arrays.

A kernel is written for `[T, H], [S, H], [S, V]`. Every array of a problem first gets the leading
axes `[*B, K, G]` (N = K·G), each of full size or of size 1. An axis of size 1 is not mapped: a
group shares its key/value head, and all heads share parameters, without a copy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Layout, Shape
from attention_jax._core.mesh_axes import vmap_divided
from attention_jax._core.numerics import through_float32, widen_low
from attention_jax._core.pytrees import partition
from attention_jax._core.term import Sides


def head_axes(parts: tuple[Any, Sides], layout: Layout) -> tuple[Any, Sides]:
    """Gives each leaf of `(per-head parameters, sides)` the leading axes `[*#B, #K, #G]`.

    Leaves come as `Term` and `Mask` promise: parameters `[#N, ...]`; query and key data
    `[*#B, #N, length, ...]`; pair data `[*#B, #N, #T, #S]`, or fewer axes by NumPy's rule.
    """
    rank = len(layout.batch) + 1

    def fit(leaf: Any, own_axes: int) -> Any:
        missing = rank + own_axes - leaf.ndim
        shape = (1,) * missing + leaf.shape if missing > 0 else leaf.shape[-missing or None :]
        batch, heads, own = shape[: rank - 1], shape[rank - 1], shape[rank:]
        # K key/value heads, or 1, are shared inside the group.
        split = (layout.K, layout.group) if heads == layout.N else (heads, 1)
        return leaf.reshape(*batch, *split, *own)

    parameters, sides = parts
    return (
        jax.tree.map(lambda x: fit(x, x.ndim - 1), parameters),
        Sides(
            query=jax.tree.map(lambda x: fit(x, max(1, x.ndim - rank)), sides.query),
            key=jax.tree.map(lambda x: fit(x, max(1, x.ndim - rank)), sides.key),
            pair=jax.tree.map(lambda x: fit(x, 2), sides.pair),
        ),
    )


def join_head_axes(tree: Any, layout: Layout) -> Any:
    """Leaves with leading axes `[*#B, #K, #G]` to leaves with `[*#B, #N]`."""
    rank = len(layout.batch)

    def join(x: Any) -> Any:
        batch, (kv, group), rest = x.shape[:rank], x.shape[rank : rank + 2], x.shape[rank + 2 :]
        if kv * group not in (1, layout.N):
            shape = (*batch, layout.K, layout.group, *rest)
            x = through_float32(lambda x: jnp.broadcast_to(x, shape), x)
            kv, group = layout.K, layout.group
        return x.reshape(*batch, kv * group, *rest)

    return jax.tree.map(join, tree)


def merge_axes(tree: Any, sizes: Shape) -> tuple[Any, Shape]:
    """Joins neighbouring leading axes wherever every leaf is mapped over both or over neither.

    Fewer nested loops, the same numbers: `[B, K, G]` becomes `[B·K·G]` for plain self-attention.
    """
    axis = 0
    while axis + 1 < len(sizes):
        first, second = sizes[axis], sizes[axis + 1]
        full = first * second
        pairs = {leaf.shape[axis : axis + 2] for leaf in jax.tree.leaves(tree)}
        if pairs <= {(first, second), (1, 1)}:
            at = axis
            tree = jax.tree.map(
                lambda x, at=at: x.reshape(
                    *x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]
                ),
                tree,
            )
            sizes = (*sizes[:axis], full, *sizes[axis + 2 :])
        else:
            axis += 1
    return tree, sizes


def map_leading(
    function: Callable[[Any], Any], tree: Any, sizes: Shape, *, loop: bool = False
) -> Any:
    """Maps `function` over the leading axes `sizes` of every leaf of `tree`.

    With `loop` the axes are mapped one entry at a time (`lax.map`), which keeps the working set of
    a CPU in cache; else they are vectorised (`vmap`), for accelerators and sharding. The
    transposed loop adds up the cotangents of a leaf that all entries share in that leaf's dtype, so
    `function` gets such a leaf in float32 where it has fewer bits.
    """
    if not sizes:
        return function(tree)
    size = sizes[0]
    mapped = [leaf.shape[0] == size and size != 1 for leaf in jax.tree.leaves(tree)]
    entries, shared, parts = partition(tree, mapped)
    shared = [leaf[0] for leaf in shared]
    if loop and size != 1:
        shared = widen_low(shared)

    def inner(entries: list[Any]) -> Any:
        one = parts.join(entries, shared)
        return map_leading(function, one, sizes[1:], loop=loop) if sizes[1:] else function(one)

    if size == 1:
        return jax.tree.map(lambda x: x[None], inner(entries))
    return jax.lax.map(inner, entries) if loop else vmap_divided(inner, entries, size)
