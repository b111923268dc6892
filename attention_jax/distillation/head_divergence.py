"""The divergence of one student head from its teacher, row by row, in blocks.

    D_t = Σ_s f(p_ts, q_ts),   ln p = x_p - lse_p,   ln q = x_q - lse_q

One pass over the blocks computes both log-sum-exps, a second one the sums. The derivative is one
linear function of the logits' tangents, a third pass, which JAX transposes for the backward pass:

    d D = Σ_s (f_ln q - q Σ f_ln q) dx_q + (f_ln p - p Σ f_ln p) dx_p

Nothing of size T·S is stored, forward or backward.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from attention_jax._core.axes import Array
from attention_jax._core.leading_axes import map_leading
from attention_jax._core.numerics import NEG_INF, is_floating, lowest, stats_dtype, widen_low
from attention_jax._core.pytrees import partition
from attention_jax.distillation.pairing import Pairs
from attention_jax.distillation.terms import log_of, terms
from attention_jax.kernels.block import (
    cut,
    mask_logits,
    narrow,
    push,
    raw_logits,
    visible_pairs,
)
from attention_jax.kernels.block_loops import block_start, scan_rows, sum_blocks
from attention_jax.kernels.online_softmax import rescale
from attention_jax.kernels.problem import Problem, Static


class Facts(NamedTuple):
    """Static facts of a pair of problems.

    Attributes:
        kind: the divergence.
        student: static facts of the student's problem.
        teacher: static facts of the teacher's problem.
        teachers: M, the number of teacher heads for each student head.
        block: (query, key) size of a block.
        dtypes: the dtype of each array of the pair, to which blocks are cast.
    """

    kind: str
    student: Static
    teacher: Static
    teachers: int
    block: tuple[int, int]
    dtypes: Pairs


class Normalizer(NamedTuple):
    """The log-sum-exp of rows as two summands; under a large bias their sum would lose the second.

    At the end, the `log_total` of an empty row is -1; no other is negative. Both are finite, and so
    is what is saved for the derivative.
    """

    top: Array
    log_total: Array


class Sums(NamedTuple):
    """Of each row: the divergence, `Σ f_ln q`, and `Σ p_m f_p` for each teacher head."""

    value: Array
    by_log_q: Array
    by_share: Array


def divergence_of_head(pairs: Pairs, kinds: Any, facts: Facts) -> Array:
    """The divergence `[T]` of one head of one example; `kinds` are the kinds of blocks."""
    known = isinstance(kinds, np.ndarray)
    both = pairs, None if known else kinds
    floats, others, parts = partition(both, map(is_floating, jax.tree.leaves(both)))

    def join(floats: list[Any], others: list[Any]) -> tuple[Pairs, Any]:
        pairs, traced = parts.join(floats, others)
        return pairs, kinds if known else traced

    @jax.custom_jvp
    def rows(floats: list[Any], others: list[Any]) -> Array:
        pairs, kinds = join(floats, others)
        normalizers = _normalizers(pairs, kinds, facts)
        return _without_empty(pairs, normalizers, _sums(pairs, kinds, facts, normalizers).value)

    @functools.partial(rows.defjvp, symbolic_zeros=True)
    def _rows_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        floats, others = primals
        pairs, kinds = join(floats, others)
        # None, and so not a leaf, if the tangent is zero
        # wide, so that the transpose sums over blocks in float32
        moving = [None if isinstance(x, SymbolicZero) else widen_low(x) for x in tangents[0]]
        return _push_forward(pairs, join(moving, [None] * len(others))[0], kinds, facts)

    return rows(floats, others)


def _push_forward(pairs: Pairs, d_pairs: Pairs, kinds: Any, facts: Facts) -> tuple[Array, Array]:
    """The divergence and its tangent, in plain JAX, so that it has higher derivatives."""
    size, dtype = facts.block, _dtype(facts)
    normalizers = _normalizers(pairs, kinds, facts)
    sums = _sums(pairs, kinds, facts, normalizers)
    rows = (normalizers, sums.by_log_q, sums.by_share)

    def fetch(i: Array, j: Array) -> Any:
        d_block = _cut(d_pairs, facts, i, j, narrowed=False)
        return _cut(pairs, facts, i, j), d_block, _rows_of(rows, facts, i)

    def contribute(fetched: Any, partial: bool) -> Array:
        block, d_block, ((normal_q, normal_p), by_log_q, by_share) = fetched
        visible = _visible(block, partial)
        (raw_q, raw_p), (d_q, d_p) = _raw_tangents(block, d_block, visible)
        x_q, x_p = _masked(block, facts, raw_q, raw_p, visible)
        log_q, log_p = _log_weights(x_q, normal_q, dtype), _log_weights(x_p, normal_p, dtype)
        mixed = _mix(log_p, block.share)
        found = terms(facts.kind, mixed, log_q)
        change = jnp.zeros((size[0],), dtype)
        if d_q is not None:
            d_q = jnp.where(x_q == NEG_INF, 0, d_q).astype(dtype)
            slope = found.by_log_q - jnp.exp(log_q) * by_log_q[:, None]
            change = change + jnp.sum(slope * d_q, axis=-1)
        if d_p is not None:
            d_p = jnp.where(x_p == NEG_INF, 0, d_p).astype(dtype)
            share = jnp.ones((facts.teachers,), dtype) if block.share is None else block.share
            slope = (
                _relative(log_p, mixed) * found.by_log_p[None]
                - jnp.exp(log_p) * by_share.T[..., None]
            )
            change = change + jnp.sum(share.astype(dtype)[:, None, None] * slope * d_p, axis=(0, 2))
        return change

    change = sum_blocks(jnp.zeros_like(sums.value), size, kinds, fetch, contribute)
    if d_pairs.share is not None:
        change = change + jnp.sum(sums.by_share * d_pairs.share.astype(dtype)[None], axis=-1)
    value, change = (_without_empty(pairs, normalizers, x) for x in (sums.value, change))
    return value, change


def _without_empty(pairs: Pairs, normalizers: tuple[Normalizer, ...], rows: Array) -> Array:
    """Sets rows `[T]` to 0 that are empty for the student or the teacher."""
    student, teacher = (x.log_total < 0 for x in normalizers)
    if pairs.share is not None:
        teacher = teacher | (pairs.share == 0)[None]
    return jnp.where(student | teacher.all(-1), 0, rows)


def _normalizers(pairs: Pairs, kinds: Any, facts: Facts) -> tuple[Normalizer, Normalizer]:
    """The normalizers of the student's rows `[T]` and of the teacher's `[T, M]`."""
    dtype, rows = _dtype(facts), facts.block[0]

    def begin(i: Array) -> tuple[Normalizer, Normalizer]:
        empty = Normalizer(jnp.full((rows,), lowest(dtype), dtype), jnp.zeros((rows,), dtype))
        return empty, jax.tree.map(lambda x: jnp.tile(x[None], (facts.teachers, 1)), empty)

    def step(state: tuple[Normalizer, Normalizer], block: Pairs, j: Array, partial: bool) -> Any:
        logits = _logits(block, facts, partial)
        return tuple(_absorb(old, x.astype(dtype)) for old, x in zip(state, logits, strict=True))

    def close(i: Array, state: tuple[Normalizer, Normalizer]) -> tuple[Normalizer, Normalizer]:
        student, teacher = (_close(x) for x in state)
        return student, jax.tree.map(jnp.transpose, teacher)

    fetch = functools.partial(_cut, pairs, facts)
    return scan_rows(facts.student.layout.T, rows, kinds, begin, fetch, step, close)


def _sums(
    pairs: Pairs, kinds: Any, facts: Facts, normalizers: tuple[Normalizer, Normalizer]
) -> Sums:
    dtype, rows = _dtype(facts), facts.block[0]

    def begin(i: Array) -> Sums:
        zeros = jnp.zeros((rows,), dtype)
        return Sums(zeros, zeros, jnp.zeros((rows, facts.teachers), dtype))

    def fetch(i: Array, j: Array) -> Any:
        return _cut(pairs, facts, i, j), _rows_of(normalizers, facts, i)

    def step(state: Sums, fetched: Any, j: Array, partial: bool) -> Sums:
        block, (normal_q, normal_p) = fetched
        x_q, x_p = _logits(block, facts, partial)
        log_q, log_p = _log_weights(x_q, normal_q, dtype), _log_weights(x_p, normal_p, dtype)
        mixed = _mix(log_p, block.share)
        found = terms(facts.kind, mixed, log_q)
        by_share = jnp.sum(_relative(log_p, mixed) * found.by_log_p[None], axis=-1).T
        new = Sums(found.value.sum(-1), found.by_log_q.sum(-1), by_share)
        return jax.tree.map(jnp.add, state, new)

    T, close = facts.student.layout.T, lambda i, state: state
    return scan_rows(T, rows, kinds, begin, fetch, step, close)


def _dtype(facts: Facts) -> np.dtype:
    return stats_dtype(facts.student.accumulator, facts.teacher.accumulator)


def _cut(pairs: Pairs, facts: Facts, i: Any, j: Any, *, narrowed: bool = True) -> Pairs:
    """Block (i, j) of both problems; a block of tangents is not `narrowed` to the dtypes."""

    def one(problem: Problem, own: Static, dtypes: Problem) -> Problem:
        if not jax.tree.leaves(problem):
            return problem
        block = cut(problem, own, facts.block, i, j)
        return narrow(block, dtypes) if narrowed else block

    def of_teacher(head: Problem) -> Problem:
        return one(head, facts.teacher, facts.dtypes.teacher)

    teacher = map_leading(of_teacher, pairs.teacher, (facts.teachers,))
    student = one(pairs.student, facts.student, facts.dtypes.student)
    return Pairs(student, teacher, pairs.share)


def _rows_of(tree: Any, facts: Facts, i: Any) -> Any:
    """The rows of query block i."""
    at = block_start(i, facts.block[0], facts.student.layout.T)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, facts.block[0]), tree)


def _visible(block: Pairs, partial: bool) -> tuple[Array | None, Array | None]:
    """The visible pairs of the student and of each teacher head; None is all."""
    visible = functools.partial(visible_pairs, partial=partial)
    return visible(block.student), jax.vmap(visible)(block.teacher)


def _masked(
    block: Pairs, facts: Facts, student: Array, teacher: Array, visible: tuple[Any, Any]
) -> tuple[Array, Array]:
    def one(head: Problem, logits: Array, visible: Array | None) -> Array:
        return mask_logits(head, facts.teacher, logits, visible)

    own = mask_logits(block.student, facts.student, student, visible[0])
    return own, jax.vmap(one)(block.teacher, teacher, visible[1])


def _logits(block: Pairs, facts: Facts, partial: bool) -> tuple[Array, Array]:
    """Logits of a block: the student's `[Tb, Sb]`, the teacher's `[M, Tb, Sb]`."""
    visible = _visible(block, partial)
    student = raw_logits(block.student, visible[0])
    teacher = jax.vmap(raw_logits)(block.teacher, visible[1])
    return _masked(block, facts, student, teacher, visible)


def _raw_tangents(
    block: Pairs, d_block: Pairs, visible: tuple[Any, Any]
) -> tuple[tuple[Array, Array], tuple[Any, Any]]:
    """Raw logits of both problems, and their tangents; None is zero."""

    def one(problem: Problem, tangent: Problem, function: Any, visible: Any) -> tuple[Array, Any]:
        if not jax.tree.leaves(tangent):
            return function(problem, visible), None
        return push(lambda moved: function(moved, visible), problem, tangent)

    x_q, d_q = one(block.student, d_block.student, raw_logits, visible[0])
    x_p, d_p = one(block.teacher, d_block.teacher, jax.vmap(raw_logits), visible[1])
    return (x_q, x_p), (d_q, d_p)


def _absorb(state: Normalizer, logits: Array) -> Normalizer:
    """One step of the online softmax; `log_total` is the total until `_close`."""
    top, shrink, powers = rescale(state.top, logits)
    return Normalizer(top, state.log_total * shrink + jnp.sum(powers, axis=-1))


def _close(state: Normalizer) -> Normalizer:
    empty = state.log_total == 0
    log_total = jnp.log(jnp.where(empty, 1, state.log_total))
    return Normalizer(jnp.where(empty, 0, state.top), jnp.where(empty, -1, log_total))


def _log_weights(logits: Array, normalizer: Normalizer, dtype: Any) -> Array:
    """`ln p` of a block: the student's `[Tb, Sb]`, or the teacher's `[M, Tb, Sb]`."""
    top, log_total = (x.T[..., None] for x in normalizer)
    return (logits.astype(dtype) - top) - log_total


def _mix(log_p: Array, share: Array | None) -> Array:
    """`ln Σ_m a_m p_m`, `[Tb, Sb]`."""
    if share is None:
        return log_p[0]
    parts = log_p + log_of(share.astype(log_p.dtype))[:, None, None]
    top = jax.lax.stop_gradient(jnp.max(parts, axis=0))
    shift = jnp.where(top == NEG_INF, 0, top)
    total = jnp.sum(jnp.exp(parts - shift[None]), axis=0)
    return jnp.where(top == NEG_INF, NEG_INF, shift + log_of(total))


def _relative(log_p: Array, mixed: Array) -> Array:
    """`p_m / p`, `[M, Tb, Sb]`, 0 where p is 0."""
    zero = mixed == NEG_INF
    return jnp.exp(jnp.where(zero[None], NEG_INF, log_p - jnp.where(zero, 0, mixed)[None]))
