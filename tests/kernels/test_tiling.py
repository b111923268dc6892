"""Tilings: the kinds of blocks are those of the mask, for the block size that is chosen."""

import numpy as np
import pytest

import attention_jax as aj
from attention_jax.attend import make_request
from attention_jax.kernels.tiling import SMALL_PLANE, tile, whole_plane
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED

m = aj.masks
MASKS = {
    "causal": m.causal(),
    "at the end": m.causal(align="end"),
    "window": m.causal() & m.window(40, 0),
    "union": m.prefix(70) | (m.causal() & m.window(130, 0)),
    "not": ~m.window(300, 300),
    "nothing": m.causal() & ~m.causal(),
    "global": m.window(20, 20) | m.global_tokens(np.array([3, 700])),
}


def request(T, S, **options):
    query, key = (np.zeros((1, length, 2, 4), np.float32) for length in (T, S))
    return make_request(query, key, key, **options)


@pytest.mark.parametrize("block_size", [None, 64, (100, 30)])
@pytest.mark.parametrize(("T", "S"), [(1100, 1300), (700, 200)])
@pytest.mark.parametrize("mask", MASKS)
def test_kinds_are_those_of_the_mask(mask, T, S, block_size):
    tiling = tile(request(T, S, mask=MASKS[mask], block_size=block_size))
    assert tiling.kinds is not None
    rows, columns = tiling.block
    plane = np.asarray(MASKS[mask].to_array(T, S))
    kinds = tiling.kinds.array
    assert kinds.shape == (-(-T // rows), -(-S // columns))
    for (i, j), kind in np.ndenumerate(kinds):
        block = plane[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        if kind == FULL:
            assert block.all()
            assert block.shape == (rows, columns)  # a ragged block is partial
        if kind == SKIPPED:
            assert not block.any()
    chosen = MASKS[mask].block_map(T, S, tiling.block).kinds
    assert ((kinds == SKIPPED) >= (chosen == SKIPPED)).all()  # never less is known


@pytest.mark.parametrize(
    ("mask", "block"),
    [
        (None, (512, 1024)),
        (m.causal(), (512, 512)),
        (m.window(100, 0) & m.causal(), (128, 128)),
        (m.block_diagonal(64), (64, 64)),
        (m.padding(np.array([1000])), (512, 512)),
    ],
)
def test_blocks_are_smaller_under_a_sparser_mask(mask, block):
    assert tile(request(4096, 4096, mask=mask)).block == block


def test_kinds_that_depend_on_data_are_not_in_the_tiling():
    positions = np.arange(600)
    for options in (
        {"mask": m.padding(np.array([100]))},
        {"mask": m.from_array(np.ones((600, 600), bool))},
        {"mask": m.causal(), "query_positions": positions, "key_positions": positions},
    ):
        assert tile(request(600, 600, **options)).kinds is None


@pytest.mark.parametrize(("T", "loop"), [(64, False), (65, True)])
def test_a_small_plane_is_one_block_with_vectorised_heads(T, loop):
    tiling = tile(request(T, SMALL_PLANE // 64, mask=m.causal()))
    assert tiling[:2] == ((64, 64), loop)


def test_a_bias_that_may_mask_leaves_no_block_full():
    biased = request(1024, 1024, bias=np.zeros((1024, 1024), np.float32))
    assert (tile(biased).kinds.array == PARTIAL).all()
    assert (tile(request(1024, 1024)).kinds.array == FULL).all()


def test_a_tiling_is_a_key_of_jit():
    first, second = (tile(request(900, 900, mask=m.causal())) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert hash(whole_plane(request(9, 9), loop=True)) is not None
