"""Which blocks a walk visits, and in which order.

Lists are NumPy's where the kinds of blocks are known while tracing.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax._core.agree import one_for_all
from attention_jax._core.axes import Array
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED

# Up to how many pairs of blocks a sweep over traced kinds is one loop, and else in how many parts.
_FEW = 64
_PARTS = 8


def _join_kinds(kinds: Array) -> Array:
    """One kind of block for several, by the first axis."""
    whole, none = jnp.min(kinds, 0) == FULL, jnp.max(kinds, 0) == SKIPPED
    return jnp.where(whole, np.int8(FULL), jnp.where(none, np.int8(SKIPPED), np.int8(PARTIAL)))


one_kind = one_for_all(_join_kinds)


def by_row(kinds: Any) -> tuple[Any, Any, Any]:
    """For each query block its key blocks: the full ones first, then those to look into.

    Returns:
        Key blocks `[nT, most]`, and int32 `[nT]` where the full ones end and where all visited end.
    """
    known = isinstance(kinds, np.ndarray)
    kinds, xp = (kinds, np) if known else (one_kind(kinds), jnp)
    columns = xp.argsort(FULL - kinds, axis=1, stable=True).astype(np.int32)
    full, visited = (xp.sum(kinds >= least, axis=1, dtype=np.int32) for least in (FULL, PARTIAL))
    most = max(1, int(visited.max())) if known else kinds.shape[1]
    return columns[:, :most], full, visited


def in_parts(kinds: Array) -> tuple[Array, Array, Array]:
    """Of traced kinds all pairs, the visited ones first, as `[parts, n]`; one part if they are few.

    Returns:
        Query block, key block and kind of each.
    """
    flat = one_kind(kinds).ravel()
    order = jnp.argsort(flat == SKIPPED, stable=True).astype(jnp.int32)
    columns = np.int32(kinds.shape[1])
    parts = _PARTS if flat.size > _FEW else 1
    pad = (0, -flat.size % parts)
    pairs = (order // columns, order % columns, flat[order])
    i, j, kind = (jnp.pad(x, pad).reshape(parts, -1) for x in pairs)
    return i, j, kind


def in_columns(kinds: Any) -> list[tuple[Any, Any, Any]]:
    """Rows, their key blocks and kinds, in groups that are walked one after the other.

    For loops whose length JAX must know: all rows of a group take as many steps as its longest, the
    others filled up with skipped blocks. So a few rows that see everything, as those of global
    tokens, stand apart, where that leaves out more than half of all steps. Traced kinds keep every
    column.
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
