"""How a kernel walks the plane: loop order and block sizes, picked in this one place.

Measured on two CPU cores (float32, H 64): blocks of half a million pairs keep the matrix products
at their rate, smaller ones waste less where a mask leaves little, and walking head by head keeps
one block's plane in cache. With several devices, or on an accelerator, heads are vectorised
instead: a loop over a sharded axis would gather it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.kernels.request import Request
from attention_jax.masks.block_map import SKIPPED

Block = tuple[int, int]


class Tiling(NamedTuple):
    """The dial settings of one call.

    Attributes:
        block: (query, key) size of a block, at most the lengths.
        loop: whether examples and heads are walked one by one and not vectorised.
    """

    block: Block
    loop: bool


# Blocks to choose from, with the measured time of a pair relative to the first.
_CPU_BLOCKS: dict[Block, float] = {
    (512, 1024): 1.0,
    (512, 512): 1.02,
    (256, 256): 1.25,
    (128, 128): 1.4,
    (64, 64): 2.1,
}
_DATA_BLOCK = (512, 512)  # for masks whose map is known only at run time
_VECTORISED_BLOCK = (256, 256)  # one plane for each example and head at once
_LARGEST_MAP = 2**20  # blocks up to which a map is drawn only to choose a size


def on_one_cpu() -> bool:
    """Whether heads may be walked one by one: elsewhere they are vectorised, or divided."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def tiling(request: Request) -> Tiling:
    """The tiling for a request; a `block_size` that was asked for is used as it is."""
    layout = request.layout
    loop = on_one_cpu()
    if request.block_size is not None:
        block = request.block_size
    elif loop:
        block = _cpu_block(request)
    else:
        block = _VECTORISED_BLOCK
    return Tiling((max(1, min(block[0], layout.T)), max(1, min(block[1], layout.S))), loop)


def _cpu_block(request: Request) -> Block:
    mask, layout = request.mask, request.layout
    first = request.score.block_hint or next(iter(_CPU_BLOCKS))
    if mask is None or 0 in (layout.T, layout.S):
        return first
    if jax.tree.leaves((mask, request.query_positions, request.key_positions)):
        return _DATA_BLOCK

    def cost(block: Block) -> float:
        kinds: Any = mask.block_map(layout.T, layout.S, block).kinds
        return float((kinds != SKIPPED).sum()) * block[0] * block[1] * _CPU_BLOCKS[block]

    counts = {
        block: np.prod([-(-n // b) for n, b in zip((layout.T, layout.S), block, strict=True)])
        for block in _CPU_BLOCKS
    }
    candidates = [block for block in _CPU_BLOCKS if counts[block] <= _LARGEST_MAP]
    return min(candidates, key=cost, default=first)
