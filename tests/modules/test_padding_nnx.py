"""Padding: where it may stand, and that it may hold anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.layers.arguments import real_positions
from attention_jax.nnx import MultiHeadAttention, Transformer, TransformerEncoderLayer

pytestmark = pytest.mark.thorough

SOURCE = jnp.array([[3, 4, 5, 6, 7, 8, 9], [3, 4, 5, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 5, 4, 3, 2], [1, 6, 7, 8, 2]])


def _normal(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def _model(**options):
    return Transformer(1, 2, 8, 16, 11, 13, rngs=nnx.Rngs(0), **options)


def test_padding_may_stand_on_either_side():
    model = _model()
    alone = nnx.jit(lambda model: model(SOURCE[1:, :3], TARGET[1:]))(model)
    padded = jnp.roll(SOURCE[1:], 4, axis=1)
    target = jnp.pad(TARGET[1:], ((0, 0), (2, 0)))
    run = nnx.jit(lambda model, *given, **told: model(*given, **told))
    found = run(model, padded, target, padded > 0, target > 0)
    np.testing.assert_allclose(found[:, 2:], alone, rtol=1e-5, atol=1e-5)
    holes = jnp.array([[True, False, True, True, False, False]])
    np.testing.assert_array_equal(real_positions(holes, (1, 6)), [[0, 1, 1, 2, 3, 4]])
    told = {"source_positions": jnp.arange(7) - 4, "target_positions": jnp.arange(7) - 2}
    masks = (
        aj.masks.from_array(padded[:, None, None] > 0),
        aj.masks.from_array(target[:, None, None] > 0),
    )
    found = run(model, padded, target, *masks, **told)  # mask objects leave positions alone
    np.testing.assert_allclose(found[:, 2:], alone, rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(model, padded, target, *masks)[:, 2:], alone, rtol=1e-3)


def test_chunks_see_the_real_tokens_of_the_source():
    """A mask of tokens `[*B, S]` is one of pairs in no chunk, whatever its length."""
    model, mask = _model(scan_layers=True), SOURCE > 0

    @nnx.jit
    def rows(model):
        memory = model.encode(SOURCE, mask)
        cache, made = model.new_cache(memory, 5), []
        for start, end in ((0, 2), (2, 3), (3, 5)):
            row, cache = model.with_cache(TARGET[:, start:end], cache, mask)
            made.append(row)
        return jnp.concatenate(made, 1), model.decode(TARGET, memory, None, mask)

    found, expected = rows(model)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["attention", "layer"])
def test_padding_that_is_no_number_spoils_nothing_though_it_looks_itself(part):
    """Case A01: its own row is not a number, and a loss over the real rows is none of its."""
    if part == "attention":
        layer = MultiHeadAttention(2, 8, fused_qkv=True, normalize_qk=True, rngs=nnx.Rngs(0))
    else:
        layer = TransformerEncoderLayer(2, 8, 8, norm="pre", rngs=nnx.Rngs(0))
    mask, x = jnp.arange(5) < 3, _normal(5, 8)

    def loss(layer, x):
        out = layer(x, mask=mask[None, None])
        return jnp.sum(out[:3] ** 2), out[3:]

    run = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (spoiled, loud), other = run(layer, x.at[3:].set(jnp.nan))
    (value, _), slope = run(layer, x)
    assert np.isnan(loud).all()
    np.testing.assert_allclose(spoiled, value, rtol=1e-6)
    for left, right in zip(jax.tree.leaves(slope), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
