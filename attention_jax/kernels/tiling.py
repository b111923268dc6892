"""How a kernel walks the plane: loop order and block sizes, picked in this one place.

Measured on two CPU cores (float32, H 64): large blocks keep the matrix products at their rate, and
walking head by head keeps one block's plane in cache. With several devices, or on an accelerator,
heads are vectorised instead: a loop over a sharded axis would gather it.
"""

from typing import NamedTuple

import jax

from attention_jax.kernels.request import Request


class Tiling(NamedTuple):
    """The dial settings of one call.

    Attributes:
        block: (query, key) size of a block, at most the lengths.
        loop: whether examples and heads are walked one by one and not vectorised.
    """

    block: tuple[int, int]
    loop: bool


CPU_BLOCK = (1024, 1024)
ACCELERATOR_BLOCK = (512, 512)


def tiling(request: Request) -> Tiling:
    """The tiling for a request; a `block_size` that was asked for is used as it is."""
    layout = request.layout
    loop = jax.default_backend() == "cpu" and jax.device_count() == 1
    block = request.block_size or (CPU_BLOCK if loop else ACCELERATOR_BLOCK)
    return Tiling((min(block[0], layout.T), min(block[1], layout.S)), loop)
