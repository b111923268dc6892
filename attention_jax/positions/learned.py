"""Learned absolute position embeddings: one row of a table per position."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attention_jax._core.checks import as_array, check_floating
from attention_jax._core.numerics import is_concrete, through_float32

Table = Annotated[Any, Float[Array, "P D"]]
Positions = Annotated[Any, Int[Array, "*T"]]


def learned(table: Table, positions: Positions) -> Float[Array, "*T D"]:
    """Learned absolute position embeddings, `table[positions]`, `[*T, D]`.

    They are added to the inputs.

    Args:
        table: `[P, D]`, one row per position; differentiable.
        positions: ints of any shape, in [0, P).

    Returns:
        `[*T, D]` with the table's dtype. For a traced position out of range the row is NaN.

    Raises:
        ValueError: a concrete position is out of range; it is not clamped to the last row.

    Example:
        >>> learned(jnp.eye(3), jnp.array([2, 0])).tolist()
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]

    References:
        Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", arXiv:1705.03122, §3.1.
    """
    as_array("table", table)
    check_floating("table", table)
    as_array("positions", positions)
    if table.ndim != 2:
        raise ValueError(f"table must be [P, D], got {list(table.shape)}")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers, got dtype {np.dtype(positions.dtype).name}")
    rows = table.shape[0]
    if is_concrete(positions) and np.size(positions):
        known = np.asarray(positions)  # NumPy: jnp.min would be traced inside jit
        least, most = int(known.min()), int(known.max())
        if least < 0 or most >= rows:
            raise ValueError(
                f"positions run from {least} to {most}, but the table has rows for 0 to {rows - 1}"
            )
    positions = jnp.asarray(positions).astype(jnp.int32)
    # a negative index would count from the end, so it is moved out of range
    at = jnp.where(positions < 0, rows, positions)
    return through_float32(lambda x: x.at[at].get(mode="fill", fill_value=jnp.nan), table)
