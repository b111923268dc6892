"""Axial attention: along one axis of a grid, by reshaping.

    attend(query, key, value, mask=masks.axial(shape, axis))

without the mask: every line of the grid becomes an example, so the cost is T · shape[axis] and no
pair outside a line is computed.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import BiasLike, Key, MaskLike, Query, Shape, Value
from attention_jax._core.checks import as_array, check_inputs, check_known, check_mask
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.pytrees import pytree
from attention_jax._core.term import Sides, Term
from attention_jax.attend import Implementation, attend
from attention_jax.masks.data import from_array
from attention_jax.masks.mask import Lengths, Mask, Verdict, View
from attention_jax.masks.strides import check_grid
from attention_jax.positions.array_bias import ArrayBias
from attention_jax.scores.score import Score


@arguments_of(attend)
def axial_attention(  # noqa: D417
    query: Query,
    key: Key,
    value: Value,
    shape: Sequence[int],
    axis: int,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    implementation: Implementation = None,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> Float[Array, "*B T N V"]:
    """Axial attention: `attend(..., mask=masks.axial(shape, axis) & mask)`, by reshaping.

    Args:
        query: `[*B, T, N, H]`, T the number of cells of the grid in row-major order.
        key: `[*B, T, K, H]`.
        value: `[*B, T, K, V]`.
        shape: the grid's sizes, whose product is T.
        axis: the axis of attention; negative values count from the last axis.
        mask: a further mask, on the positions of the whole grid, 0..T-1. A mask object, or a bool
            array that masks queries, `[*#B, #N, T, 1]`, or keys, `[*#B, #N, 1, T]`.
        bias: a bias object, on the same positions.

    Returns:
        `[*B, T, N, V]` with the query's dtype.

    Raises:
        ValueError: T or S is not the number of cells; a mask array has an entry for each pair.

    Example:
        >>> image = jnp.ones((3, 32 * 32, 4, 8))
        >>> axial_attention(image, image, image, (32, 32), axis=0).shape
        (3, 1024, 4, 8)

    References:
        Ho et al. 2019, "Axial Attention in Multidimensional Transformers", arXiv:1912.12180, §3.
    """
    layout = check_inputs(query, key, value)
    check_known("axial_attention", T=layout.T, S=layout.S)
    sizes, at = check_grid(shape, axis)
    cells = math.prod(sizes)
    if (layout.T, layout.S) != (cells, cells):
        raise ValueError(
            f"a grid of shape {list(sizes)} has {cells} cells, but T = {layout.T} and "
            f"S = {layout.S}"
        )
    if bias is not None and (isinstance(bias, ArrayBias) or not isinstance(bias, Term)):
        raise TypeError(
            "axial_attention takes a bias object of positions; for a bias array use "
            "attend(..., mask=masks.axial(shape, axis), bias=array)"
        )
    grid = _Grid(layout.batch, sizes, at)
    if mask is not None:
        mask = mask if isinstance(mask, Mask) else from_array(as_array("mask", mask))
        data = mask.prepare(Lengths(cells, cells, lead=(*layout.batch, layout.N)))
        check_mask(data, layout)
        mask = Lines(mask, grid.sides(data), grid.per_example(mask.overflowed()))
    positions = grid.lines(np.arange(cells, dtype=np.int32), 0)
    positions = jnp.broadcast_to(positions, (*grid.lead, positions.shape[-1]))
    out = attend(
        *(grid.lines(jnp.asarray(x), 2) for x in (query, key, value)),
        score=score,
        mask=mask,
        bias=bias,
        query_positions=positions,
        key_positions=positions,
        implementation=implementation,
        block_size=block_size,
        precision=precision,
    )
    return grid.whole(out)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The reshaping of the grid's cells to lines along `axis`, and back."""

    batch: Shape
    sizes: Shape
    axis: int

    @property
    def others(self) -> Shape:
        """The grid's other sizes, in order."""
        return self.sizes[: self.axis] + self.sizes[self.axis + 1 :]

    @property
    def lead(self) -> Shape:
        """The leading axes of the lines."""
        return (*self.batch, *self.others)

    def lines(self, x: Any, behind: int) -> Any:
        """`[..., T, *behind]` to `[..., *others, n, *behind]`."""
        front = x.ndim - behind - 1
        x = x.reshape(*x.shape[:front], *self.sizes, *x.shape[front + 1 :])
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.moveaxis(x, front + self.axis, front + len(self.sizes) - 1)

    def whole(self, x: Array) -> Array:
        """`[*B, *others, n, N, V]` back to `[*B, T, N, V]`."""
        front = len(self.batch)
        x = jnp.moveaxis(x, front + len(self.sizes) - 1, front + self.axis)
        return x.reshape(*self.batch, math.prod(self.sizes), *x.shape[-2:])

    def sides(self, data: Sides) -> Sides:
        """A mask's data, reshaped to lines."""
        return Sides(
            query=jax.tree.map(lambda x: self._side(x, 0), data.query),
            key=jax.tree.map(lambda x: self._side(x, 0), data.key),
            pair=jax.tree.map(self._pair, data.pair),
        )

    def per_example(self, x: Any) -> Any:
        """The mask's `overflowed()`, for all lines of an example."""
        return None if x is None else self._side(x, 0)

    def _side(self, x: Any, behind: int) -> Any:
        """`[*#B, #N, #T, *behind]` to `[*#B, *#others, #N, #n, *behind]`."""
        rank = len(self.batch) + 2 + behind
        x = x.reshape((1,) * (rank - x.ndim) + x.shape)
        head, length = len(self.batch), len(self.batch) + 1
        if x.shape[length] == 1:
            ones = (1,) * len(self.others)
            return x.reshape(*x.shape[:head], *ones, *x.shape[head:])
        x = self.lines(x, behind)
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.moveaxis(x, head, head + len(self.others))

    def _pair(self, x: Any) -> Any:
        """A pair array with one entry per query or one per key, reshaped to lines."""
        if x.shape[-2] > 1 and x.shape[-1] > 1:
            raise ValueError(
                f"mask has an entry for each pair, {list(x.shape)}; axial_attention takes masks of "
                "queries or of keys: use attend(..., mask=masks.axial(shape, axis) & mask)"
            )
        if x.shape[-2] > 1:
            return self._side(x, 1)
        return self._side(x[..., 0, :], 0)[..., None, :]


@pytree
class Lines(Mask):
    """A mask of the whole grid, with its data reshaped to lines."""

    mask: Mask
    sides: Sides
    full: Any = None

    def overflowed(self) -> Any:
        """As in the inner mask."""
        return self.full

    def prepare(self, lengths: Lengths) -> Sides:
        """The reshaped data."""
        return self.sides

    def per_head(self) -> Mask:
        """The inner mask for one head."""
        return self.mask.per_head()

    def allowed(self, view: View) -> Any:
        """As in the inner mask."""
        return self.mask.allowed(view)

    def decide(self, low: View, high: View) -> Verdict:
        """As in the inner mask."""
        return self.mask.decide(low, high)
