"""One row an implementation: every case of the suite that the row declares."""

from functools import partial

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax.plan import KERNELS, VENDORS

EVERYTHING = set(aj.testing.FEATURES) - {"scale"}  # attend has a score in its place
# For a further block size of the same kernel, larger than the lengths.
BLOCKS = {"mask", "lengths", "grouped_heads", "value_depth", "gradients", "dropout"}

# Nothing but values, and derivatives of any order.
PLAIN = {
    "lengths", "grouped_heads", "value_depth", "no_batch", "no_keys", "gradients", "forward_mode",
    "second_order", "vmap", "eager", "float16", "bfloat16", "mixed_dtypes",
}  # fmt: skip
# A mask object goes by the query's index, which a call with one query does not have.
ONE_BY_ONE = EVERYTHING - {"bias", "bias_gradient", "minus_infinity", "masks", "positions"}
ONE_BY_ONE = ONE_BY_ONE - {"scores", "dropout"}

# Rows that take long for what they add to the others here.
THOROUGH = {"blockwise, 3", "flash, (4, 5)", "single_query"}
ROWS = {
    "dense": ("dense", None, EVERYTHING),
    "blockwise, 3": ("blockwise", 3, EVERYTHING),
    "blockwise, 16": ("blockwise", 16, BLOCKS),
    "flash, (4, 5)": ("flash", (4, 5), EVERYTHING),
    "flash, 16": ("flash", 16, BLOCKS),
    "short": ("short", None, PLAIN),
    "single_query": ("single_query", None, ONE_BY_ONE),
}


def one_by_one(query, key, value, mask=None, **options):
    """Every query by a call of its own."""
    rows = []
    for t in range(query.shape[-3]):
        part = mask if mask is None or mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., t, :]
        part = part[..., None, :] if part is not None and part is not mask else part
        rows.append(aj.attend(query[..., t : t + 1, :, :], key, value, mask=part, **options))
    empty = jnp.zeros((*query.shape[:-3], 0, query.shape[-2], value.shape[-1]), query.dtype)
    return jnp.concatenate([empty, *rows], axis=-3)


@pytest.mark.parametrize(
    "row",
    [pytest.param(r, marks=[pytest.mark.thorough] if r in THOROUGH else []) for r in ROWS],
)
def test_our_implementations(row):
    implementation, block_size, supports = ROWS[row]
    attend = one_by_one if implementation == "single_query" else aj.attend
    f = partial(attend, implementation=implementation, block_size=block_size)
    aj.testing.check_attention(f, supports, scores=aj.scores, masks=aj.masks)


def test_every_kernel_on_a_cpu_has_a_row():
    assert set(KERNELS) - set(VENDORS.values()) <= {
        implementation for implementation, _, _ in ROWS.values()
    }


# What every attention of JAX and Flax can do. All lack: empty rows (they give the mean, or NaN
# where a bias is -inf), NaN in masked keys, mixed dtypes, other scores, mask objects.
# Derivatives of higher order and transformations are JAX's own there, and not tried.
THEIRS = {
    "mask", "bias", "broadcast", "lengths", "no_batch", "gradients", "bias_gradient", "bfloat16",
}  # fmt: skip

THIRD_PARTIES = {
    # Without V ≠ H, masks of fewer axes, several batch axes, S = 0; no float16 product on a CPU;
    # float64 is cut to float32.
    "jax.nn": (jax.nn.dot_product_attention, THEIRS | {"grouped_heads", "scale"}),
    # Goes through jax.nn: the same, but for more axes and S = 0, and without grouped heads.
    "flax.nnx": (
        flax.nnx.dot_product_attention,
        THEIRS | {"fewer_axes", "many_batch", "no_keys"},
    ),
    # Without grouped heads, and float16 where scores leave its range.
    "flax.linen": (
        flax.linen.dot_product_attention,
        THEIRS | {"fewer_axes", "many_batch", "no_keys", "value_depth", "float64"},
    ),
}


@pytest.mark.parametrize("row", THIRD_PARTIES)
def test_third_parties(row):
    f, supports = THIRD_PARTIES[row]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        aj.testing.check_attention(f, supports)


@pytest.mark.parametrize("row", THIRD_PARTIES)
def test_what_a_third_party_lacks_is_seen_lacking(row):
    f, supports = THIRD_PARTIES[row]
    with pytest.raises(AssertionError, match=r"empty rows: out: max error"):
        aj.testing.check_attention(f, supports | {"empty_rows"}, only="empty rows")
    with pytest.raises(AssertionError, match="poison"):
        aj.testing.check_attention(f, supports | {"hidden_nan"}, only="NaN")
