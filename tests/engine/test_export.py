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


Q, K = "b, 7, 4, 8", "b, 7, 2, 8"
SUB = aj.subquadratic
EYE = np.eye(3, 7, dtype=np.float32)
ADDITIVE = aj.scores.additive(normal(8, 3), normal(8, 3), normal(3))


def over_cache(key, rolling):
    cache = aj.cache.KVCache.init(key.shape[0], 9, 2, 8, rolling=rolling).append(key, key)
    cache = cache.append(key[:, :1], key[:, :1]).reorder(jnp.arange(key.shape[0]))
    at = {"query_positions": cache.next_positions(1), "key_positions": cache.positions()}
    mask = cache.mask() & aj.masks.causal()
    return aj.attend(key[:, :1], cache.key, cache.value, mask=mask, **at), cache


def divergence(query, key, mask):
    options = {"teacher_mask": mask, "student_mask": mask}
    return aj.distillation.attention_divergence((query, key), (2 * query, key), **options)


FAMILIES = {
    "weights": lambda q, k, m: aj.attention_weights(q, k, mask=m),
    "divergence": divergence,
    "axial": lambda q, k, m: aj.axial_attention(q, k, k, (7, 1), 0, mask=m),
    "chunked": lambda q, k, m: SUB.linear_attention(q, k, k, mask=m),
    "parallel": lambda q, k, m: SUB.linear_attention(q, k, k, mask=m, form="parallel"),
    "recurrent": lambda q, k, m: SUB.linear_attention(q, k, k, mask=m, form="recurrent"),
    "compressed": lambda q, k, m: SUB.memory_compressed_attention(q, k, k, 3, mask=m),
    "routed": lambda q, k, m: SUB.routed_attention(q, k, k, block_size=3, num_blocks=2, mask=m),
    "lsh": lambda q, k, m: SUB.lsh_attention(q, q, jax.random.key(0), num_buckets=4, mask=m),
    "nystrom": lambda q, k, m: SUB.nystrom_attention(q, k, k, num_landmarks=3, mask=m),
    "low rank": lambda q, k, m: SUB.low_rank_attention(q, k, k, EYE, EYE, mask=m),
}
WITHOUT_ORDER = ("nystrom", "low rank")


def functions():
    for name, family in FAMILIES.items():
        for mask in ("none", "padding", "causal"):
            if mask == "causal" and name in WITHOUT_ORDER:
                continue

            def masked(query, key, family=family, mask=mask):
                padding = aj.masks.padding(jnp.arange(query.shape[0]) % 7 + 1)
                causal = aj.masks.causal()
                return family(query, key, {"padding": padding, "causal": causal}.get(mask))

            marks = [pytest.mark.thorough] if mask == "none" else []
            yield pytest.param(masked, (Q, K), id=f"{name} {mask}", marks=marks)
    for name, run, *specs in (
        ("additive", lambda q, k: aj.attend(q, k, k, score=ADDITIVE), "b, 70, 4, 8", "b, 70, 2, 8"),
        ("cache", lambda k: over_cache(k, rolling=False), K),
        ("rolling cache", lambda k: over_cache(k, rolling=True), K),
        ("step", lambda q, k: SUB.linear_attention_step(q, k, k), "b, 4, 8", "b, 2, 8"),
    ):
        yield pytest.param(run, specs, id=name)


@pytest.mark.parametrize(("run", "specs"), list(functions()))
def test_a_symbolic_batch_in_every_function(run, specs):
    exported = export.export(jax.jit(run))(*symbolic(*specs))
    for batch in (1, 3):
        arrays = [normal(*(batch if n == "b" else int(n) for n in s.split(", "))) for s in specs]
        for got, want in zip(
            *map(jax.tree.leaves, (exported.call(*arrays), run(*arrays))), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


TABLE, SQUARE = normal(5, 8), normal(8, 8)
BY_ANY_LENGTH = {
    "one length": lambda q, k: aj.attend(q, k, k, score=ADDITIVE, mask=aj.masks.padding(3)),
    "lengths": lambda q, k: aj.attend(q, k, k, mask=aj.masks.padding(np.array([3, 9]))),
    "relative values": lambda q, k: aj.shaw_attention(q, k, k, TABLE, TABLE),
    "transformer_xl": lambda q, k: aj.attend(
        q, k, k, bias=aj.positions.transformer_xl(SQUARE, SQUARE[0], SQUARE[1])
    ),
    "relative_bias": lambda q, k: aj.attend(
        q, k, k, bias=aj.positions.relative_bias(normal(4, 32) * 0 + 1)
    ),
    "sparse": lambda q, k: aj.attend(
        q, k, k, mask=aj.masks.sparse_fixed(3) | aj.masks.bigbird(jax.random.key(0), 9, 2)
    ),
}


@pytest.mark.parametrize("name", BY_ANY_LENGTH)
def test_symbolic_lengths_in_masks_scores_and_biases(name):
    run = BY_ANY_LENGTH[name]
    exported = export.export(jax.jit(run))(*symbolic("2, t, 4, 8", "2, s, 2, 8"))
    for T, S in ((5, 8), (70, 90)):
        arrays = normal(2, T, 4, 8), normal(2, S, 2, 8)
        np.testing.assert_allclose(exported.call(*arrays), run(*arrays), rtol=1e-3, atol=1e-4)


def by_length():
    causal = aj.masks.causal()
    for name, family in FAMILIES.items():
        if name != "weights":
            yield pytest.param(lambda q, k, family=family: family(q, k, None), id=name)
    yield pytest.param(lambda q, k: aj.explain(q, k, k).visited, id="explain")
    yield pytest.param(
        lambda q, k: aj.cache.KVCache.init(q.shape[0], 9, 4, 8).append(q, q), id="append"
    )
    yield pytest.param(
        lambda q, k: aj.cache.KVCache.init(2, 9, 4, 8).next_positions(q.shape[1]),
        id="next_positions",
    )
    yield pytest.param(lambda q, k: causal.block_map(q.shape[1], k.shape[1], 4).kinds, id="map")
    yield pytest.param(lambda q, k: causal.density(q.shape[1], k.shape[1]), id="density")


@pytest.mark.parametrize("specs", [("2, t, 4, 8", "2, t, 2, 8"), ("b, t, 4, 8", "b, 7, 2, 8")])
@pytest.mark.parametrize("run", list(by_length()))
def test_a_function_that_needs_known_lengths_names_them(run, specs):
    with pytest.raises(NotImplementedError, match=r"\w+ needs known sizes, got symbolic .*T = t"):
        export.export(jax.jit(run))(*symbolic(*specs))


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
