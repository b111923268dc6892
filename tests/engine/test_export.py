"""`jax.export`: symbolic sizes, and serialized functions of the library's pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attention_jax as aj

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def symbolic(*specs):
    scope = export.SymbolicScope()
    shapes = (export.symbolic_shape(spec, scope=scope) for spec in specs)
    return [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("implementation", [None, "dense", "blockwise", "flash"])
def test_a_symbolic_batch(implementation):
    def run(query, key):
        options = {"mask": aj.masks.causal(), "implementation": implementation}
        dropout = {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}
        return aj.attend_with_stats(query, key, key, **options, **dropout)

    exported = export.export(jax.jit(run))(*symbolic("b, 7, 4, 8", "b, 7, 2, 8"))
    for batch in (1, 3):
        arrays = normal(batch, 7, 4, 8), normal(batch, 7, 2, 8)
        for got, want in zip(
            *map(jax.tree.leaves, (exported.call(*arrays), run(*arrays))), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_symbolic_lengths():
    def run(query, key, implementation=None):
        return aj.attend(query, key, key, mask=aj.masks.causal(), implementation=implementation)

    shapes = symbolic("2, t, 4, 8", "2, s, 2, 8")
    exported = export.export(jax.jit(run))(*shapes)
    arrays = normal(2, 5, 4, 8), normal(2, 9, 2, 8)
    np.testing.assert_allclose(exported.call(*arrays), run(*arrays), rtol=1e-4, atol=1e-5)
    for name in ("blockwise", "flash"):
        with pytest.raises(NotImplementedError, match=r"symbolic T = t, S = s"):
            export.export(jax.jit(lambda q, k, name=name: run(q, k, name)))(*shapes)


def objects():
    masks, scores, ones = aj.masks, aj.scores, jnp.ones
    key = jax.random.key(0)
    return [
        masks.causal() & masks.window(3, None),
        ~masks.prefix(2) | masks.random(key, 7, 2, 1),
        masks.padding(jnp.array([3, 7]), jnp.array([7, 4])),
        masks.segments(ones((2, 7), int), padding_id=0),
        masks.custom(jnp.greater_equal),
        scores.additive(ones((8, 3)), ones((8, 3)), ones(3), activation=jax.nn.gelu),
        scores.soft_cap(scores.scaled_dot(0.3), 5.0) + aj.positions.alibi(4),
        aj.positions.relative_bias(ones((4, 32))),
        aj.cache.KVCache.init(2, 7, 2, 8, rolling=True),
        aj.subquadratic.LinearState.init(2, 2, 8, 8),
        aj.subquadratic.cosine_features(9),
        aj.softmax.Stats(ones(3), ones(3), ones(3)),
    ]


@pytest.mark.parametrize("given", objects(), ids=lambda x: type(x).__name__)
def test_an_exported_function_of_an_object_serializes(given):
    pytest.importorskip("flatbuffers")
    exported = export.export(jax.jit(lambda x: x))(given)
    out = export.deserialize(exported.serialize()).call(given)
    assert type(out) is type(given)
    assert jax.tree.structure(out) == jax.tree.structure(given)


def test_a_function_of_the_caller_is_refused_by_name():
    pytest.importorskip("flatbuffers")
    mask = aj.masks.custom(lambda q, k: k <= q)
    exported = export.export(jax.jit(lambda x, mask: aj.attend(x, x, x, mask=mask)))
    with pytest.raises(TypeError, match=r"cannot serialize .*<lambda>"):
        exported(normal(7, 2, 8), mask).serialize()
