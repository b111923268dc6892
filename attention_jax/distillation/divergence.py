"""Divergences between the attention weights of a teacher and a student, in O(T + S) memory.

D_t = Σ_s f(p_ts, q_ts),   p = softmax of the teacher's logits, q = of the student's
"""

import dataclasses
import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import AnyArray, Array, BiasLike, KeyPositions, QueryPositions
from attention_jax._core.checks import as_array, check_floating, check_inputs, check_known
from attention_jax._core.compiled import compiled
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.leading_axes import map_leading
from attention_jax._core.numerics import precision_of_products, stats_dtype, widen
from attention_jax._core.term import Term
from attention_jax.attend import attend, make_request
from attention_jax.distillation.head_divergence import Facts, divergence_of_head
from attention_jax.distillation.pairing import pair_up, shares
from attention_jax.distillation.terms import check_kind, log_of, terms
from attention_jax.kernels.block import dtypes_of
from attention_jax.kernels.per_head import lower_heads
from attention_jax.kernels.request import AttentionInputs, Request
from attention_jax.kernels.tiling import Tiling, tile
from attention_jax.layers.arguments import AnyMask
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED
from attention_jax.scores.score import Score

QueryAndKey = Annotated[Any, "([*B, T, N, H], [*B, S, K, H]), or AttentionInputs"]
AnyBias = Term | BiasLike | None


@arguments_of(
    attend,
    teacher_score="score",
    student_score="score",
    teacher_mask="mask",
    student_mask="mask",
    teacher_bias="bias",
    student_bias="bias",
)
def attention_divergence(  # noqa: D417
    teacher: QueryAndKey,
    student: QueryAndKey,
    *,
    teacher_score: Score | None = None,
    student_score: Score | None = None,
    teacher_mask: AnyMask = None,
    student_mask: AnyMask = None,
    teacher_bias: AnyBias = None,
    student_bias: AnyBias = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    kind: str = "kl",
    head_map: Annotated[Any, Float[Array, "N M"]] | None = None,
    teacher_gradient: bool = False,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> Float[Array, "*B N T"]:
    """Divergence of the student's attention weights from the teacher's, for each row, in nats.

        kl              Σ_s p ln(p / q)         p the teacher's weights, q the student's
        reverse_kl      Σ_s q ln(q / p)
        cross_entropy   -Σ_s p ln q
        js              Jensen-Shannon: half the kl of p and half that of q, to their mean

    Memory is O(T + S), forward and backward. Teacher and student have the same batch axes and
    lengths; scores, masks, depths and heads may differ.

    A term is 0 if its factor is 0. Rows that are empty for the teacher or the student are 0 and
    have no gradient. kl and cross_entropy are +inf for a row if the student masks a key to which
    the teacher gives weight, reverse_kl in the opposite case; js is at most ln 2. Probabilities
    that underflow are compared by their logarithms. Gradients are finite, also for infinite rows.

    Args:
        teacher: `(query [*B, T, M, H], key [*B, S, K, H])` of the teacher, with M heads; or
            `AttentionInputs` from `diagnostics.attention_inputs`, which include score, mask, bias
            and positions.
        student: the same for the student, with N heads.
        query_positions: ints `[T]` or `[*B, T]`, for every pair (query, key).
        key_positions: ints `[S]` or `[*B, S]`, likewise.
        kind: "kl", "reverse_kl", "js" or "cross_entropy".
        head_map: weights `[N, M]` with rows that sum to 1: the target of head n is
            `Σ_m head_map[n, m] p_m`. Differentiable, so that it can be learned, as a softmax. By
            default the target of head n is head n; if M is a multiple of N, the mean of M / N
            adjacent heads; if N is a multiple of M, N / M heads share a target.
        teacher_gradient: whether to differentiate with respect to the teacher.
        block_size: size of a block, an int or a pair (query, key); chosen by default.

    Returns:
        `[*B, N, T]`, a row for each student head; float32, float64 for float64.

    Raises:
        TypeError: as in `attend`.
        ValueError: shapes that do not match, numbers of heads of which neither is a multiple of the
            other without a `head_map`, an unknown kind; a score, mask, bias or positions beside
            `AttentionInputs`.

    Example:
        >>> import jax
        >>> import attention_jax as aj
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> teacher = [jax.random.normal(k, (2, 7, 4, 16)) for k in keys[:2]]
        >>> student = [jax.random.normal(k, (2, 7, 2, 8)) for k in keys[2:]]
        >>> rows = aj.distillation.attention_divergence(teacher, student, kind="js")
        >>> rows.shape, bool((rows > 0).all())
        ((2, 2, 7), True)

    References:
        Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network",
        arXiv:1503.02531, §2.
        Wang et al. 2020, "MiniLM", arXiv:2002.10957, eq. 3 (kl of attention maps).
    """
    check_kind(kind)
    positions = {"query_positions": query_positions, "key_positions": key_positions}
    requests = []
    for name, given, score, mask, bias in (
        ("teacher", teacher, teacher_score, teacher_mask, teacher_bias),
        ("student", student, student_score, student_mask, student_bias),
    ):
        own = {f"{name}_score": score, f"{name}_mask": mask, f"{name}_bias": bias}
        query, key, options = _inputs(name, given, own, positions)
        options |= {"block_size": block_size, "precision": precision}
        requests.append(_request(name, query, key, options))
    theirs, ours = (request.layout for request in requests)
    if (theirs.batch, theirs.T, theirs.S) != (ours.batch, ours.T, ours.S):
        raise ValueError(
            "teacher and student must share batch axes and lengths: the teacher has [*B, T, S] = "
            f"{[*theirs.batch, theirs.T, theirs.S]}, the student {[*ours.batch, ours.T, ours.S]}"
        )
    check_known("attention_divergence", T=ours.T, S=ours.S)
    heads, share = shares(head_map, ours.N, theirs.N)
    if not teacher_gradient:
        requests[0] = jax.lax.stop_gradient(requests[0])
    if 0 in (*ours.batch, ours.T, ours.S, ours.N):
        dtype = stats_dtype(*(x.dtype for r in requests for x in (r.query, r.key)))
        return jnp.zeros((*ours.batch, ours.N, ours.T), dtype)
    of_student = tuple(map(tuple, heads.tolist()))
    return _divergence(*requests, share, of_student, kind, _tilings(*requests))


def _tilings(teacher: Request, student: Request) -> tuple[Tiling, Tiling]:
    """Tilings of the teacher and the student with the same blocks."""
    wanted = tile(student if teacher.score.block_hint is None else teacher)
    theirs, ours = (
        tile(dataclasses.replace(x, block_size=wanted.block))._replace(loop=wanted.loop)
        for x in (teacher, student)
    )
    return theirs, ours


def _inputs(
    name: str, given: Any, own: dict[str, Any], positions: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Query, key and the options of a request, of one side.

    Args:
        name: "teacher" or "student".
        given: a pair (query, key), or `AttentionInputs`.
        own: the score, mask and bias for a pair, by the name of the argument.
        positions: the positions for a pair.
    """
    options = {**dict(zip(("score", "mask", "bias"), own.values(), strict=True)), **positions}
    if isinstance(given, AttentionInputs):
        beside = [argument for argument, x in {**own, **positions}.items() if x is not None]
        if beside:
            raise ValueError(
                f"{name} is AttentionInputs, which include score, mask, bias and positions: give "
                f"no {beside[0]} beside it, or {name}=(inputs.query, inputs.key)"
            )
        return given.query, given.key, {option: getattr(given, option) for option in options}
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(
            f"{name} must be a pair (query, key) or AttentionInputs, got {type(given).__name__}"
        )
    return given[0], given[1], options


def _request(name: str, query: Any, key: Any, options: dict[str, Any]) -> Request:
    try:
        check_inputs(query, key)
        value = key[..., :0]
        return make_request(query, key, value, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the {name}: {error}") from None


@functools.partial(compiled, static=(3, 4, 5))
def _divergence(
    teacher: Request,
    student: Request,
    share: Any,
    heads: tuple[tuple[int, ...], ...],
    kind: str,
    tilings: tuple[Tiling, Tiling],
) -> Array:
    with precision_of_products(student.precision):
        return _every_head(teacher, student, share, np.asarray(heads), kind, tilings)


def _every_head(
    teacher: Request,
    student: Request,
    share: Any,
    heads: np.ndarray,
    kind: str,
    tilings: tuple[Tiling, Tiling],
) -> Array:
    layout, (block, loop, _) = student.layout, tilings[1]
    theirs, ours = map(lower_heads, (teacher, student), tilings)
    if block == (layout.T, layout.S):
        union: Any = np.full((1, 1), PARTIAL, np.int8)
    else:
        union = _union(*(_joined(x.kinds, len(layout.batch)) for x in (theirs, ours)))
    known = isinstance(union, np.ndarray)
    pairs = pair_up((ours.problem, layout), (theirs.problem, teacher.layout), heads, share)
    facts = Facts(kind, ours.facts, theirs.facts, heads.shape[1], block, dtypes_of(pairs))

    def one(parts: tuple[Any, Any]) -> Array:
        pairs, traced = parts
        return divergence_of_head(pairs, union if known else traced, facts)

    parts = (pairs, None if known else union)
    return map_leading(one, parts, (*layout.batch, layout.N), loop=loop)


def _joined(kinds: Any, rank: int) -> Any:
    """Kinds of blocks joined over heads: `[nT, nS]`, or traced `[*#B, 1, nT, nS]`."""
    if isinstance(kinds, np.ndarray):
        return kinds
    least, most = jnp.min(kinds, (rank, rank + 1)), jnp.max(kinds, (rank, rank + 1))
    return jnp.expand_dims(_one_kind(least, most, jnp), rank)


def _union(a: Any, b: Any) -> Any:
    """Full if both are full, empty if both are empty, else partial."""
    xp = np if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else jnp
    rank = max(a.ndim, b.ndim)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    return _one_kind(xp.minimum(a, b), xp.maximum(a, b), xp)


def _one_kind(least: Any, most: Any, xp: Any) -> Any:
    some = xp.where(most == SKIPPED, np.int8(SKIPPED), np.int8(PARTIAL))
    return xp.where(least == FULL, np.int8(FULL), some)


def divergence(
    teacher: Float[AnyArray, "*batch S"], student: Float[AnyArray, "*batch S"], *, kind: str = "kl"
) -> Float[Array, "*batch"]:
    """Divergence between given distributions, over the last axis.

        kl = Σ_s p ln(p / q); the other kinds are those of `attention_divergence`

    Args:
        teacher: probabilities `[..., S]`, without a gradient.
        student: probabilities `[..., S]`.
        kind: "kl", "reverse_kl", "js" or "cross_entropy".

    Returns:
        `[...]`, float32 at least. A term is 0, with gradient 0, if its factor is 0, and +inf if
        only the other probability is 0. If either row is all zeros, the divergence is 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from attention_jax.distillation import divergence
        >>> teacher, student = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.5, 0.25, 0.25])
        >>> print(f"{divergence(teacher, student):.5f}")
        0.34657
    """
    check_kind(kind)
    for name, x in (("teacher", teacher), ("student", student)):
        check_floating(name, as_array(name, x))
    if teacher.shape != student.shape:
        raise ValueError(
            f"teacher {list(teacher.shape)} and student {list(student.shape)} must have the same "
            "shape"
        )
    return _of_distributions(teacher, student, kind)


@functools.partial(jax.jit, static_argnames=("kind",))
def _of_distributions(teacher: Any, student: Any, kind: str) -> Array:
    dtype = stats_dtype(teacher.dtype, student.dtype)
    p, q = (widen(x).astype(dtype) for x in (teacher, student))
    log_p, log_q = log_of(jax.lax.stop_gradient(p)), log_of(q)
    rows = jnp.sum(terms(kind, log_p, log_q).value, axis=-1)
    return jnp.where((p == 0).all(-1) | (q == 0).all(-1), 0, rows)
