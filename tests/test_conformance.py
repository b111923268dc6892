"""One row an implementation: every case of the suite that the row declares."""

from functools import partial

import jax
import pytest

import attention_jax as aj
from attention_jax.plan import KERNELS

EVERYTHING = set(aj.testing.FEATURES) - {"scale"}  # attend has a score in its place
# For a further block size of the same kernel: all that depends on where blocks end.
BLOCKS = {
    "mask", "bias", "lengths", "grouped_heads", "value_depth", "empty_rows", "hidden_nan",
    "minus_infinity", "gradients", "bias_gradient", "masks", "dropout",
}  # fmt: skip

ROWS = {
    "dense": ("dense", None, EVERYTHING),
    "blockwise, 3": ("blockwise", 3, EVERYTHING),
    "blockwise, (4, 5)": ("blockwise", (4, 5), BLOCKS),
    "blockwise, 16": ("blockwise", 16, BLOCKS),
    "flash, 3": ("flash", 3, EVERYTHING),
    "flash, (4, 5)": ("flash", (4, 5), BLOCKS),
    "flash, 16": ("flash", 16, BLOCKS),
}


@pytest.mark.parametrize("row", [name for name, row in ROWS.items() if row[0] in KERNELS])
def test_our_implementations(row):
    implementation, block_size, supports = ROWS[row]
    f = partial(aj.attend, implementation=implementation, block_size=block_size)
    aj.testing.check_attention(f, supports, scores=aj.scores, masks=aj.masks)


def test_every_kernel_on_a_cpu_has_a_row():
    elsewhere = {"cudnn", "splash"}
    assert set(KERNELS) - elsewhere <= {implementation for implementation, _, _ in ROWS.values()}


def test_jax_nn():
    # It lacks: empty rows and poison in masked keys (both give the mean or NaN), V ≠ H, masks of
    # fewer axes, several batch axes, S = 0, -inf rows, mixed dtypes, dropout, other scores.
    supports = {
        "mask", "bias", "broadcast", "lengths", "grouped_heads", "no_batch", "gradients",
        "bias_gradient", "forward_mode", "second_order", "vmap", "eager", "float16", "bfloat16",
        "float64", "scale",
    }  # fmt: skip
    with jax.numpy_dtype_promotion("standard"):  # its own code promotes float16 to float32
        aj.testing.check_attention(jax.nn.dot_product_attention, supports)
