"""Tilings: block size, loop order and the kinds of blocks, computed once for each call.

Measured on two CPU cores (float32, H 64): blocks of half a million pairs reach the peak rate of
matrix products, smaller ones waste less if a mask leaves few pairs, and a loop over heads keeps one
block's plane in cache. With several devices, or on an accelerator, heads are vectorised instead: a
loop over a sharded axis would gather it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax._core.axes import Layout
from attention_jax._core.numerics import arange
from attention_jax.kernels.request import Request
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED, kinds_of, verdict
from attention_jax.masks.view import View, whole_view

Block = tuple[int, int]


class KnownKinds(NamedTuple):
    """Kinds of blocks that are known while tracing, int8 `[nT, nS]`, as bytes: hashable."""

    shape: tuple[int, int]
    data: bytes

    @classmethod
    def of(cls, kinds: np.ndarray) -> "KnownKinds":
        """The kinds `[nT, nS]`."""
        return cls((kinds.shape[0], kinds.shape[1]), kinds.astype(np.int8).tobytes())

    @property
    def array(self) -> np.ndarray:
        """int8 `[nT, nS]`: 0 skipped, 1 partial, 2 full."""
        return np.frombuffer(self.data, np.int8).reshape(self.shape)


class Tiling(NamedTuple):
    """How a kernel divides the plane of one call; hashable.

    Attributes:
        block: (query, key) size of a block, at most the lengths.
        loop: whether examples and heads are looped over instead of vectorised.
        kinds: the kinds of blocks; None if they depend on data.
    """

    block: Block
    loop: bool
    kinds: KnownKinds | None = None


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
_LARGEST_MAP = 2**20  # blocks up to which a map is computed only to choose a size
# Pairs of a head up to which heads are vectorised on any device: a loop would cost more.
SMALL_PLANE = 64 * 64


def on_one_cpu() -> bool:
    """Whether heads may be looped over: with several devices they may be sharded."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def tile(request: Request) -> Tiling:
    """The tiling of a request; a given `block_size` is used unchanged."""
    layout = request.layout
    loop, block, kinds = on_one_cpu(), request.block_size, None
    if block is None and layout.T * layout.S <= SMALL_PLANE:
        loop, block = False, (layout.T, layout.S)
    elif block is None and not loop:
        block = _VECTORISED_BLOCK
    elif block is None:
        block, kinds = _cpu_block(request)
    block = max(1, min(block[0], layout.T)), max(1, min(block[1], layout.S))
    if kinds is None:
        kinds = _static_kinds(request, block)
    return Tiling(block, loop, _with_ends(request, block, kinds))


def whole_plane(request: Request, *, loop: bool) -> Tiling:
    """All pairs of a head in one block."""
    block = max(request.layout.T, 1), max(request.layout.S, 1)
    kind = PARTIAL if request.mask is not None or request.may_hide else FULL
    return Tiling(block, loop, KnownKinds((1, 1), bytes([kind])))


def without_mask(layout: Layout, block: Block, *, may_hide: bool) -> np.ndarray:
    """The kinds without a mask, int8 `[nT, nS]`: full, or partial at a ragged end.

    The last block of an axis that the block size does not divide overlaps its neighbour, so it is
    never full; nor is any block if a bias may be -inf.
    """
    counts = tuple(-(-n // size) for n, size in zip((layout.T, layout.S), block, strict=True))
    inside = np.full(counts, not may_hide)
    inside[counts[0] - 1 :, :] &= layout.T % block[0] == 0
    inside[:, counts[1] - 1 :] &= layout.S % block[1] == 0
    return np.where(inside, np.int8(FULL), np.int8(PARTIAL))


def _with_ends(request: Request, block: Block, kinds: np.ndarray | None) -> KnownKinds | None:
    if kinds is None or kinds.size != np.prod(kinds.shape[-2:]):  # heads differ
        return None
    most = without_mask(request.layout, block, may_hide=request.may_hide)
    return KnownKinds.of(np.minimum(kinds.reshape(kinds.shape[-2:]), most))


def _cpu_block(request: Request) -> tuple[Block, np.ndarray | None]:
    """The fastest block by the measured times, and its kinds from one map of small blocks."""
    layout = request.layout
    first = request.score.block_hint or next(iter(_CPU_BLOCKS))
    if request.mask is None or 0 in (layout.T, layout.S):
        return first, None
    if _depends_on_data(request):
        return _DATA_BLOCK, None

    def blocks(size: Block) -> int:
        return -(-layout.T // size[0]) * -(-layout.S // size[1])

    candidates = [size for size in _CPU_BLOCKS if blocks(size) <= _LARGEST_MAP]
    if not candidates:
        return first, None
    finer = candidates[-1]
    kinds = _static_kinds(request, finer)
    if kinds is None:
        return _DATA_BLOCK, None
    maps = {}
    for size in reversed(candidates):  # each divides the next
        kinds = _coarsen(kinds, size[0] // finer[0], size[1] // finer[1])
        maps[size], finer = kinds, size

    def cost(size: Block) -> float:
        return float((maps[size] != SKIPPED).sum()) * size[0] * size[1] * _CPU_BLOCKS[size]

    best = min(candidates, key=cost)
    return best, maps[best]


def _coarsen(kinds: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Coarsens a map: the kinds of blocks of `rows` × `columns` of these."""
    low = high = kinds
    for axis, step in ((-2, rows), (-1, columns)):
        if step == 1:
            continue
        starts = np.arange(0, kinds.shape[axis], step)
        low = np.minimum.reduceat(low, starts, axis=axis)
        high = np.maximum.reduceat(high, starts, axis=axis)
    return np.where(low == high, low, np.int8(PARTIAL))


def _depends_on_data(request: Request) -> bool:
    return bool(jax.tree.leaves((request.mask, request.query_positions, request.key_positions)))


def _static_kinds(request: Request, block: Block) -> np.ndarray | None:
    """The kinds of the mask's blocks, int8 `[..., nT, nS]`; None if they depend on data."""
    layout = request.layout
    if request.mask is None:
        return without_mask(layout, block, may_hide=False)
    if _depends_on_data(request) or 0 in (layout.T, layout.S):
        return None
    kinds = kinds_of(verdict(request.mask, plane_view(request), block))
    if not isinstance(kinds, np.ndarray):
        return None
    counts = -(-layout.T // block[0]), -(-layout.S // block[1])
    return np.broadcast_to(kinds, (*kinds.shape[:-2], *counts))


def plane_view(request: Request) -> View:
    """The `View` of the whole plane."""
    layout = request.layout

    def positions(given: Any, length: Any) -> Any:
        return arange(length) if given is None else given.astype(np.int32)

    rows = positions(request.query_positions, layout.T)
    return whole_view(request.mask_data, rows, positions(request.key_positions, layout.S))
