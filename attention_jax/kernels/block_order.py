"""The blocks that a loop visits, in order.

Lists are NumPy arrays if the kinds of blocks are known while tracing.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.batched_predicates import one_for_all
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED

# The number of parts of a loop over traced kinds; a part without a visited block is skipped.
_PARTS = 8


def join_kinds(kinds: Any, axes: int | tuple[int, ...] = 0) -> Array:
    """The kind of the union of blocks along some axes."""
    whole, none = jnp.min(kinds, axes) == FULL, jnp.max(kinds, axes) == SKIPPED
    return jnp.where(whole, np.int8(FULL), jnp.where(none, np.int8(SKIPPED), np.int8(PARTIAL)))


one_kind = one_for_all(join_kinds)


def in_parts(kinds: Array, *blocks: Array) -> tuple[Array, ...]:
    """Sorts traced kinds `[n]` and other arrays, visited blocks first, as `[parts, n / parts]`.

    The last part is padded with skipped blocks.
    """
    order = jnp.argsort(kinds == SKIPPED, stable=True)
    pad = (0, -kinds.size % _PARTS)
    return tuple(jnp.pad(x[order], pad).reshape(_PARTS, -1) for x in (kinds, *blocks))


def in_columns(kinds: Any) -> list[tuple[Any, Any, Any]]:
    """Groups of rows, each processed by one loop: rows, their key blocks and kinds.

    A loop has a static length: all rows of a group take as many steps as its longest row, padded
    with skipped blocks. Therefore a few long rows, such as those of global tokens, form a separate
    group if that saves more than half of all steps. Traced kinds keep every column.
    """
    rows = np.arange(kinds.shape[0], dtype=np.int32)
    if not isinstance(kinds, np.ndarray):
        columns = np.broadcast_to(np.arange(kinds.shape[1], dtype=np.int32), kinds.shape)
        return [(rows, columns, kinds)]
    counts = np.maximum(1, (kinds != SKIPPED).sum(axis=1))
    columns = np.argsort(kinds == SKIPPED, axis=1, stable=True).astype(np.int32)[:, : counts.max()]
    kinds = np.take_along_axis(kinds, columns, axis=1)
    few = np.unique(counts)
    steps = [(counts <= n).sum() * n + (counts > n).sum() * few[-1] for n in few]
    best = int(few[int(np.argmin(steps))])
    if 2 * min(steps) > rows.size * few[-1]:
        return [(rows, columns, kinds)]
    apart = counts > best
    return [
        (rows[~apart], columns[~apart, :best], kinds[~apart, :best]),
        (rows[apart], columns[apart], kinds[apart]),
    ]
