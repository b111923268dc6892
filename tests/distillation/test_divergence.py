"""Attention divergences against distributions computed in float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import attention_jax as aj
from attention_jax.distillation import attention_divergence, divergence
from attention_jax.distillation.terms import KINDS

pytestmark = pytest.mark.thorough

B, T, S, M, A = 2, 7, 11, 4, 3
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


TEACHER = normal(B, T, M, 6), normal(B, S, 2, 5)
STUDENT = normal(B, T, M, 8), normal(B, S, M, 8)
WEIGHT = normal(M, 6, 5)
SCORE = aj.scores.general(WEIGHT / 5)
# Either sees keys that the other does not; row 0 of the second example is empty for both.
ITS_MASK = RNG.random((B, 1, T, S)) < 0.7
OWN_MASK = RNG.random((B, M, T, S)) < 0.8
ITS_MASK[1, :, 0], OWN_MASK[1, :, 0] = False, False


def softmax(scores, mask):
    scores = np.where(mask, scores, -np.inf)
    top = np.max(scores, -1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = powers.sum(-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def teacher_map(mask=ITS_MASK):
    query, key = (x.astype(np.float64) for x in TEACHER)
    key = np.repeat(key, 2, axis=2)
    projected = np.einsum("btnh,nhk->btnk", query, WEIGHT.astype(np.float64) / 5)
    return softmax(np.einsum("btnk,bsnk->bnts", projected, key), mask)


def student_map(mask=OWN_MASK, student=STUDENT):
    query, key = (x.astype(np.float64) for x in student)
    return softmax(np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8), mask)


def expected(kind, p, q):
    """The divergences, with 0 ln 0 = 0, and their derivative by ln q where that is finite."""

    def total(weight, ratio):
        return np.where(weight > 0, weight * np.log(np.where(weight > 0, ratio, 1)), 0).sum(-1)

    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "kl":
            return total(p, p / q), -p
        if kind == "cross_entropy":
            return total(p, 1 / q), -p
        if kind == "reverse_kl":
            both = (p > 0) & (q > 0)
            slope = np.where(both, q * (np.log(np.where(both, q / p, 1)) + 1), 0)
            return total(q, q / p), slope
        middle = (p + q) / 2
        slope = np.where(q > 0, q * np.log(np.where(q > 0, q / middle, 1)) / 2, 0)
        return (total(p, p / middle) + total(q, q / middle)) / 2, slope


MASKS = {"teacher_mask": ITS_MASK, "student_mask": OWN_MASK}
ours = functools.partial(attention_divergence, TEACHER, teacher_score=SCORE)


@pytest.mark.parametrize(
    ("kind", "block"), [*((kind, None) for kind in KINDS), ("kl", (3, 4)), ("js", (4, 11))]
)
def test_values_and_gradients_match_the_weights(kind, block):
    p, q = teacher_map(), student_map()
    value, slope = expected(kind, p, q)
    finite = np.isfinite(value)
    weight = RNG.normal(size=finite.shape) * finite
    assert finite.any()
    assert kind == "js" or not finite.all()  # keys that only one of the two sees

    @jax.jit
    def run(student):
        rows, pull = jax.vjp(lambda x: ours(x, kind=kind, block_size=block, **MASKS), student)
        return rows, pull(jnp.asarray(weight, rows.dtype))[0], pull(jnp.ones_like(rows))[0]

    d_scores = weight[..., None] * (slope - q * slope.sum(-1, keepdims=True)) / np.sqrt(8)
    query, key = (x.astype(np.float64) for x in STUDENT)
    d_query = np.einsum("bnts,bsnh->btnh", d_scores, key)
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, query)
    rows, gradient, of_all = run(STUDENT)
    assert rows.shape == (B, M, T)
    np.testing.assert_allclose(rows, value, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient[0], d_query, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(gradient[1], d_key, rtol=1e-4, atol=2e-6)
    assert not np.isnan(rows).any()
    assert (np.asarray(rows)[1, :, 0] == 0).all()  # empty in both
    assert all(np.isfinite(x).all() for x in of_all)  # infinite rows too


@pytest.mark.parametrize(("kind", "block"), [("kl", (3, 4)), ("reverse_kl", None), ("js", None)])
def test_a_row_that_is_empty_on_either_side_is_0_without_a_gradient(kind, block):
    seen, every = np.ones((2, B, M, T, S), bool)
    seen[..., 5:, :] = False
    of_no_share = every.copy()
    of_no_share[:, :2, 5:] = False  # heads with share 0 do have visible keys
    share = np.float32([[0.5, 0.5, 0, 0]] * M)

    @jax.jit
    def run(teacher, student, share, its, own):
        def loss(teacher, student, share):
            rows = attention_divergence(
                teacher,
                student,
                teacher_score=SCORE,
                teacher_mask=its,
                student_mask=own,
                kind=kind,
                head_map=share,
                teacher_gradient=True,
                block_size=block,
            )
            return jnp.sum(rows[..., 5:]), rows

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(teacher, student, share)

    for its, own in ((seen, every), (every, seen), (of_no_share, every)):
        (_, rows), gradients = run(TEACHER, STUDENT, share, its, own)
        assert (rows[..., 5:] == 0).all()
        assert (rows[..., :5] != 0).all()
        assert all((x == 0).all() for x in jax.tree.leaves(gradients))


def heads_mixed(share, p):
    return np.einsum("nm,bmts->bnts", share, p)


@pytest.mark.parametrize("students", [2, 8, 3])
def test_different_numbers_of_heads_with_means_or_a_learned_map(students):
    student = normal(B, T, students, 8), normal(B, S, students, 8)
    q, p = student_map(True, student), teacher_map()
    if students == 8:
        share = np.repeat(np.eye(M), 2, axis=0)
    elif students != 3:
        share = np.repeat(np.eye(students), M // students, axis=1) * students / M
    else:
        share = softmax(RNG.normal(size=(3, M)), True)
    given = {"head_map": share.astype(np.float32)} if students == 3 else {}
    value, _ = expected("kl", heads_mixed(share, p), q)
    rows = ours(
        student, teacher_mask=ITS_MASK, block_size=(3, 4) if students == 3 else None, **given
    )
    np.testing.assert_allclose(rows, value, rtol=3e-5, atol=2e-6)


def dense(teacher, student, score, share, kind):
    """The same from whole weights, differentiated by JAX."""
    p = aj.attention_weights(*teacher, score=score, mask=ITS_MASK)
    q = aj.attention_weights(*student, mask=ITS_MASK)
    p = jnp.einsum("nm,bmts->bnts", share, p)
    p, q = (jnp.where(x > 0, x, 1) for x in (p, q))
    if kind == "kl":
        return jnp.where(ITS_MASK, p * jnp.log(p / q), 0).sum(-1)
    middle = (p + q) / 2
    each = p * jnp.log(p / middle) + q * jnp.log(q / middle)
    return jnp.where(ITS_MASK, each, 0).sum(-1) / 2


@pytest.mark.parametrize(("kind", "block"), [("kl", (3, 6)), ("js", None)])
def test_the_teacher_and_the_head_map_have_gradients_if_requested(kind, block):
    additive = aj.scores.additive(normal(M, 6, 1), normal(M, 5, 1), normal(M, 1))
    score = additive if kind == "js" else SCORE
    share = softmax(RNG.normal(size=(M, M)), True).astype(np.float32)
    share[0] = [0, 0.5, 0.5, 0]  # a head with share 0

    def loss(teacher, score, share, student, *, enabled):
        rows = attention_divergence(
            teacher,
            student,
            teacher_score=score,
            teacher_mask=ITS_MASK,
            student_mask=ITS_MASK,
            kind=kind,
            head_map=share,
            teacher_gradient=enabled,
            block_size=block,
        )
        return jnp.sum(jnp.sin(rows))

    arguments = (TEACHER, score, share, STUDENT)
    plain = jax.grad(lambda t, s, a, x: jnp.sum(jnp.sin(dense(t, x, s, a, kind))), (0, 1, 2, 3))
    wanted = jax.jit(plain)(*arguments)
    got = jax.jit(jax.grad(functools.partial(loss, enabled=True), (0, 1, 2, 3)))(*arguments)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=5e-6)
    if kind == "kl":
        return
    without = jax.jit(jax.grad(functools.partial(loss, enabled=False), (0, 1, 2, 3)))(*arguments)
    assert all((x == 0).all() for x in jax.tree.leaves(without[:2]))
    for x, y in zip(without[2:], got[2:], strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), x, y)


def test_forward_mode_second_order_and_vmap():
    def loss(query):
        rows = ours((query, STUDENT[1]), kind="js", teacher_mask=ITS_MASK, student_mask=ITS_MASK)
        return jnp.sum(jnp.sin(rows))

    def plain(query):
        rows = dense(TEACHER, (query, STUDENT[1]), SCORE, np.eye(M, dtype=np.float32), "js")
        return jnp.sum(jnp.sin(rows))

    query, direction = STUDENT[0], normal(*STUDENT[0].shape)

    def directional(f):
        return jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (direction,)))(query)

    for got, wanted in zip(directional(loss), directional(plain), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-5)
    mapped = jax.vmap(lambda t, s: attention_divergence(t, s, teacher_score=SCORE))(
        TEACHER, STUDENT
    )
    together = ours(STUDENT)
    np.testing.assert_allclose(mapped, together, rtol=1e-4, atol=1e-6)


def test_masked_nan_does_not_change_the_result():
    lengths = jnp.array([8, 5])
    mask = aj.masks.padding(lengths)
    spoil = np.arange(S)[None, :, None, None] >= np.asarray(lengths)[:, None, None, None]
    options = {"teacher_score": SCORE, "teacher_mask": mask, "student_mask": mask}

    def loss(teacher, student):
        rows = attention_divergence(teacher, student, block_size=4, **options)
        return rows.sum(), rows

    run = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True))
    clean = run(TEACHER, STUDENT)
    spoiled = [(q, np.where(spoil, np.nan, k).astype(np.float32)) for q, k in (TEACHER, STUDENT)]
    jax.tree.map(np.testing.assert_array_equal, run(*spoiled), clean)
    key = STUDENT[1].copy()
    key[0, 3, 1] = np.nan  # visible: propagates
    rows = np.asarray(run(TEACHER, (STUDENT[0], key))[0][1])
    assert np.isnan(rows[0, 1]).all()
    assert np.isfinite(rows[1]).all()


def test_low_biases_extreme_logits_and_low_precision_stay_finite():
    p = teacher_map(True)
    level = ours(
        STUDENT, student_bias=np.full((S,), -1e9, np.float32)
    )  # larger than any score by far
    np.testing.assert_allclose(level, np.log(S) + (p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-5)
    sharp = tuple(100 * x for x in STUDENT)
    assert all(np.isfinite(ours(sharp, kind=kind)).all() for kind in ("kl", "reverse_kl"))
    half = [tuple(x.astype(np.float16) for x in pair) for pair in (TEACHER, STUDENT)]
    rows = attention_divergence(*half, teacher_score=SCORE)
    assert rows.dtype == jnp.float32
    np.testing.assert_allclose(rows, ours(STUDENT), rtol=2e-2, atol=2e-2)


def sizes(jaxpr):
    for equation in jaxpr.eqns:
        for v in equation.outvars:
            if hasattr(v.aval, "shape"):
                yield int(np.prod(v.aval.shape))
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_no_array_of_all_pairs_and_at_most_64_mb_at_8192():
    length = 8192
    teacher, student = (jax.ShapeDtypeStruct((length, 1, h), jnp.float32) for h in (64, 32))

    def loss(student, teacher):
        return attention_divergence(teacher, student, teacher_mask=aj.masks.causal()).sum()

    gradient = jax.value_and_grad(loss)
    arguments = ((student, student), (teacher, teacher))
    assert max(sizes(jax.make_jaxpr(gradient)(*arguments).jaxpr)) < length * length // 50
    compiled = jax.jit(gradient).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 2**20


def test_empty_axes_and_wrong_arguments():
    for shape in ((0, S), (T, 0)):
        pair = np.ones((B, shape[0], 2, 4), np.float32), np.ones((B, shape[1], 2, 4), np.float32)
        assert attention_divergence(pair, pair).shape == (B, 2, shape[0])
    with pytest.raises(ValueError, match="kind"):
        ours(STUDENT, kind="hellinger")
    with pytest.raises(
        ValueError, match=r"share batch axes and lengths.*\[2, 7, 11\].*\[2, 6, 11\]"
    ):
        ours((STUDENT[0][:, 1:], STUDENT[1]))
    with pytest.raises(ValueError, match=r"\(4\).*\(3\).*head_map"):
        ours((normal(B, T, 3, 8), normal(B, S, 3, 8)))
    with pytest.raises(ValueError, match="summing to 1"):
        ours(STUDENT, head_map=np.ones((M, M), np.float32))
    with pytest.raises(ValueError, match=r"head_map has shape \[2, 4\]"):
        ours(STUDENT, head_map=np.ones((2, M), np.float32))
    with pytest.raises(TypeError, match="the student: mask must be boolean"):
        ours(STUDENT, student_mask=np.ones((T, S), np.float32))
    with pytest.raises(TypeError, match="student must be a pair"):
        ours(STUDENT[0])


def test_divergence_of_given_distributions():
    p = jnp.array([[0.0, 0.4, 0.6, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0] * 4, [0.5, 0.5, 0.0, 0.0]])
    logits = jnp.array(
        [[0.3, 0.1, 0.5, -jnp.inf], [0.0, -jnp.inf, 0.0, 0.0], [0.0] * 4, [-jnp.inf] * 4]
    )

    def loss(logits):
        return divergence(p, aj.softmax.masked_softmax(logits), kind="kl")

    value, gradient = jax.jit(lambda x: (loss(x), jax.jacrev(loss)(x)))(logits)
    assert np.isfinite(value[0])
    assert value[1] == np.inf
    assert (value[2:] == 0).all()
    assert np.isfinite(gradient[0]).all()
    assert gradient[0, 0, 3] == 0
    assert not np.isnan(gradient).any()
    q = jnp.array([0.5, 0.25, 0.25])
    np.testing.assert_allclose(divergence(jnp.array([0.5, 0.5, 0.0]), q), 0.34657, atol=1e-5)


def test_captured_inputs_bring_their_masks_biases_and_positions():
    def captured(seed, **options):
        rng = np.random.default_rng(seed)
        query, key = (jnp.asarray(rng.normal(size=(2, 6, 2, 8)), jnp.float32) for _ in range(2))

        def model(query, key):
            return aj.attend(query, key, key, **options)

        return aj.diagnostics.attention_inputs(model, query, key)[1]["attend"]

    bias = jnp.asarray(np.random.default_rng(2).normal(size=(6, 6)), jnp.float32)
    positions = jnp.arange(6)[::-1]
    teacher = captured(0, mask=aj.masks.causal(), query_positions=positions)
    student = captured(1, bias=bias, mask=aj.masks.causal(), key_positions=positions)
    p, q = (
        aj.attention_weights(
            *(x.query, x.key),
            mask=x.mask, bias=x.bias, query_positions=x.query_positions,
            key_positions=x.key_positions,
        )
        for x in (teacher, student)
    )  # fmt: skip
    kept = np.asarray(p > 0) & np.asarray(q > 0)
    rows = attention_divergence(teacher, student, kind="js")
    mean = (p + q) / 2
    wanted = sum(0.5 * np.where(x > 0, x * np.log(np.where(x > 0, x / mean, 1)), 0) for x in (p, q))
    wanted = np.where((np.asarray(p).sum(-1) > 0) & (np.asarray(q).sum(-1) > 0), wanted.sum(-1), 0)
    assert kept.any()
    np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)
    pair = attention_divergence((teacher.query, teacher.key), student, kind="js")
    assert float(jnp.abs(pair - rows).max()) > 0.01  # a pair has no mask

    with pytest.raises(ValueError, match="no teacher_mask beside it"):
        attention_divergence(teacher, student, teacher_mask=aj.masks.causal())
    with pytest.raises(ValueError, match="no query_positions beside it"):
        attention_divergence(teacher, student, query_positions=positions)
