"""All heads of an example side by side, for what compares them: the axes `[*B, N]` in front."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Layout
from attention_jax._core.numerics import through_float32


def join_head_axes(tree: Any, layout: Layout) -> Any:
    """Leaves `[*#B, #K, #G, ...]`, as `lower(merge=False)` gives them, to `[*#B, #N, ...]`."""
    rank = len(layout.batch)

    def join(x: Any) -> Any:
        batch, (kv, group), rest = x.shape[:rank], x.shape[rank : rank + 2], x.shape[rank + 2 :]
        if kv * group not in (1, layout.N):
            shape = (*batch, layout.K, layout.group, *rest)
            x = through_float32(lambda x: jnp.broadcast_to(x, shape), x)
            kv, group = layout.K, layout.group
        return x.reshape(*batch, kv * group, *rest)

    return jax.tree.map(join, tree)


def over_heads(function: Callable[[Any], Any], tree: Any, heads: int) -> Any:
    """`function` of each head; leaves `[heads, ...]`, or `[1, ...]` where all share them."""
    leaves, structure = jax.tree.flatten(tree)
    axes = [0 if x.shape[0] == heads else None for x in leaves]
    given = [x if axis == 0 else x[0] for x, axis in zip(leaves, axes, strict=True)]
    mapped = jax.vmap(
        lambda entries: function(jax.tree.unflatten(structure, entries)), (axes,), axis_size=heads
    )
    return mapped(given)
