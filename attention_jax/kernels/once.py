"""A walk that is none where one block is the whole plane: small planes compile without a loop."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax.kernels.block_loops import walk
from attention_jax.kernels.request import Request
from attention_jax.kernels.tiling import Tiling, tiling
from attention_jax.masks.block_map import FULL

# Pairs of a head up to which heads are vectorised wherever they run: a loop would cost more.
_SMALL_PLANE = 64 * 64


def tiling_or_once(request: Request) -> Tiling:
    """The tiling, which for a small plane is the plane itself, with heads vectorised."""
    layout = request.layout
    if request.block_size is None and layout.T * layout.S <= _SMALL_PLANE:
        return Tiling((layout.T, layout.S), False)
    return tiling(request)


def is_once(layout: Layout, block: tuple[int, int]) -> bool:
    """Whether one block is the whole plane."""
    return block == (layout.T, layout.S)


def walk_or_once(
    layout: Layout,
    block: tuple[int, int],
    kinds: Any,
    start: Callable[[Array], Any],
    fetch: Callable[[Array, Array], Any],
    visit: Callable[[Any, Any, Array, bool], Any],
    close: Callable[[Array, Any], Any],
) -> Any:
    """As `walk`; a plane of one block is visited once, and looked into unless surely full."""
    if is_once(layout, block):
        zero = jnp.int32(0)
        partial = not (isinstance(kinds, np.ndarray) and kinds.flat[0] == FULL)
        return close(zero, visit(start(zero), fetch(zero, zero), zero, partial))
    return walk(layout.T, block[0], kinds, start, fetch, visit, close)
