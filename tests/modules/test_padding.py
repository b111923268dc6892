"""Padding: on either side, and with any values in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.layers.arguments import real_positions

pytestmark = pytest.mark.thorough

SOURCE = jnp.array([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 5, 4, 3, 2], [1, 6, 7, 8, 2]])


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _model(flavour, **options):
    sizes = (1, 2, 8, 16, 11, 13)
    return flavour.layer("Transformer", *sizes, inputs=(SOURCE, TARGET), **options)


def test_padding_may_be_on_either_side(flavour):
    model = _model(flavour)
    alone = model(SOURCE[1:, :3], TARGET[1:])
    padded = jnp.roll(SOURCE[1:], 4, axis=1)
    target = jnp.pad(TARGET[1:], ((0, 0), (2, 0)))
    found = model(padded, target, padded > 0, target > 0)
    np.testing.assert_allclose(found[:, 2:], alone, rtol=1e-5, atol=1e-5)
    at = {"source_positions": jnp.arange(7) - 4, "target_positions": jnp.arange(7) - 2}
    masks = (
        aj.masks.from_array(padded[:, None, None] > 0),
        aj.masks.from_array(target[:, None, None] > 0),
    )
    found = model(padded, target, *masks, **at)  # mask objects do not change positions
    np.testing.assert_allclose(found[:, 2:], alone, rtol=1e-5, atol=1e-5)
    assert not np.allclose(model(padded, target, *masks)[:, 2:], alone, rtol=1e-3)


def test_positions_count_real_tokens():
    holes = jnp.array([[True, False, True, True, False, False]])
    np.testing.assert_array_equal(real_positions(holes, (1, 6)), [[0, 1, 1, 2, 3, 4]])


def test_chunks_attend_to_the_real_tokens_of_the_source(flavour):
    """A mask of tokens `[*B, S]` is one of pairs in no chunk, whatever its length."""
    model, mask = _model(flavour, scan_layers=True), SOURCE > 0
    memory = model(SOURCE, mask, method="encode")
    cache, made = model.apply(model.variables, memory, 5, method="new_cache"), []
    for start, end in ((0, 2), (2, 3), (3, 5)):
        row, cache = model(TARGET[:, start:end], cache, mask, method="with_cache")
        made.append(row)
    expected = model(TARGET, memory, None, mask, method="decode")
    np.testing.assert_allclose(jnp.concatenate(made, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["attention", "pre", "post"])
def test_nan_in_padding_reaches_its_own_rows_alone(flavour, part):
    """Case A01: a loss over the real rows, and its gradients, do not depend on padding."""
    x, mask = _normal(5, 8), jnp.arange(5) < 3
    if part == "attention":
        options = {"fused_qkv": True, "normalize_qk": True}
        layer = flavour.layer("MultiHeadAttention", 2, 8, inputs=(x,), **options)
    else:
        layer = flavour.layer("TransformerEncoderLayer", 2, 8, 8, norm=part, inputs=(x,))

    def loss(params, x):
        out = layer.replace(params)(x, mask=mask[None, None])
        return jnp.sum(out[:3] * jnp.sin(x[:3])), out[3:]

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (found, padding), other = run(layer.params, x.at[3:].set(jnp.nan))
    (value, _), slope = run(layer.params, x)
    assert np.isnan(padding).all()
    np.testing.assert_allclose(found, value, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(slope), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
