"""Ids outside the vocabulary: an error where they are known, NaN where they are traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from tests.modules.flavours import Made

IDS = np.array([[3, 1, 4, 1], [5, 2, 0, 3]])
WRONG = [7, -1, 127]


def _language(flavour, **options):
    return Made(
        flavour,
        lambda library, **more: library.TransformerLM(1, 2, 8, 16, vocab=7, **options, **more),
    )


def _translation(flavour):
    return Made(flavour, lambda library, **more: library.Transformer(1, 2, 8, 16, 9, 7, **more))


def _with(wrong, dtype=np.int32):
    ids = IDS.astype(dtype)
    ids[1, 2] = wrong
    return ids


@pytest.mark.parametrize("wrong", WRONG)
def test_known_ids_of_a_language_model(wrong, flavour):
    made, words = _language(flavour), f"tokens holds id {wrong}, .* has 7"
    cache = made.model.new_cache(2, 8)
    for dtype in (np.int32, np.int8):
        for ids in (_with(wrong, dtype), jnp.asarray(_with(wrong, dtype))):
            with pytest.raises(ValueError, match=words):
                made(ids)
            with pytest.raises(ValueError, match=words):
                made(ids, cache, method="with_cache")
    for mask in (aj.masks.causal(), aj.masks.padding(np.array([4, 3])), IDS > -1):
        with pytest.raises(ValueError, match=words):
            made(_with(wrong), mask)
    with pytest.raises(ValueError, match=words):
        jax.jit(lambda: made(_with(wrong)))()


@pytest.mark.parametrize("wrong", WRONG)
def test_known_ids_of_a_translation_model(wrong, flavour):
    made = _translation(flavour)
    source, target = (f"{name} holds id {wrong}, .* has" for name in ("source", "target"))
    other = 9 if wrong == 7 else wrong
    source = source.replace(str(wrong), str(other))
    memory = jnp.zeros((2, 4, 8))
    cache = made(memory, 8, method="new_cache")
    for arrays, method, words in (
        ((_with(other), IDS), "__call__", f"{source} 9"),
        ((IDS, _with(wrong)), "__call__", f"{target} 7"),
        ((_with(other),), "encode", f"{source} 9"),
        ((_with(wrong), memory), "decode", f"{target} 7"),
        ((_with(wrong), memory), "decode_states", f"{target} 7"),
        ((_with(wrong), cache), "with_cache", f"{target} 7"),
        ((_with(other), IDS), "cross_attention_weights", f"{source} 9"),
        ((IDS, _with(wrong)), "cross_attention_stats", f"{target} 7"),
    ):
        with pytest.raises(ValueError, match=words):
            made(*arrays, method=method)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32])
def test_traced_ids_give_nan_where_a_query_sees_them(dtype, flavour):
    made = _language(flavour)
    run = jax.jit(lambda ids: made(ids))
    good = run(jnp.asarray(IDS, dtype))
    for wrong in WRONG if dtype != jnp.uint8 else (7, 255):
        found = run(jnp.asarray(_with(wrong, dtype)))
        np.testing.assert_allclose(found[0], good[0], rtol=1e-5)
        np.testing.assert_allclose(found[1, :2], good[1, :2], rtol=1e-5, atol=1e-6)
        assert bool(jnp.isnan(found[1, 2:]).all())


@pytest.mark.parametrize("wrong", [-100, 7])
def test_hidden_ids_may_be_any(wrong, flavour):
    made, real = _language(flavour), np.array([[True] * 4, [True, True, False, True]])
    alone = made(IDS[1, [0, 1, 3]])
    for mask in (real, aj.masks.from_array(real[:, None, None])):
        for run in (made, jax.jit(lambda ids, mask: made(ids, mask))):
            found = run(_with(wrong), mask)
            if mask is real:
                assert bool(jnp.isfinite(found).all())
                np.testing.assert_allclose(found[1, [0, 1, 3]], alone, rtol=1e-5, atol=1e-6)
            assert bool(jnp.isfinite(found[1, [0, 1, 3]]).all())
    cache = made.model.new_cache(2, 6)
    for run in (made, lambda *a, **o: jax.jit(lambda *a: made(*a, **o))(*a)):
        found, _ = run(_with(wrong), cache, method="with_cache", valid=real)
        np.testing.assert_allclose(found[1, [0, 1, 3]], alone, rtol=1e-5, atol=1e-6)
    made = _translation(flavour)
    found = made(_with(wrong), _with(wrong), real, real)
    assert bool(jnp.isfinite(found).all())


def test_learned_positions_have_an_end(flavour):
    made = _language(flavour, positions="learned", max_length=4)
    with pytest.raises(ValueError, match=r"5 tokens .* max_length is 4"):
        made(np.ones((2, 5), int))
    for at in (np.arange(4) + 1, np.arange(4) - 1):
        with pytest.raises(ValueError, match="positions run from"):
            made(IDS, query_positions=at)
        assert bool(jnp.isnan(jax.jit(lambda at: made(IDS, query_positions=at))(at)).any())
