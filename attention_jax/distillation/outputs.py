"""Distillation losses on logits, hidden states and value relations."""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from attention_jax._core.axes import Array, Shape
from attention_jax._core.checks import as_array, check_count, check_floating
from attention_jax._core.numerics import is_concrete, matmul, stats_dtype, widen
from attention_jax.distillation.divergence import attention_divergence
from attention_jax.distillation.terms import terms
from attention_jax.layers.arguments import AnyMask, check_choice
from attention_jax.softmax import log_sum_exp

Logits = Annotated[Any, Float[Array, "*B classes"]]
Where = Annotated[Any, Bool[Array, "*#B"]]
TeacherStates = Annotated[Any, Float[Array, "*B Dt"]]
StudentStates = Annotated[Any, Float[Array, "*B Ds"]]
Values = Annotated[Any, Float[Array, "*B T N V"]]


def logit_distillation(
    teacher_logits: Logits,
    student_logits: Logits,
    *,
    temperature: float | int = 1.0,
    where: Where | None = None,
    teacher_gradient: bool = False,
) -> Float[Array, ""]:
    """KL divergence between softened predictions, times the squared temperature.

        loss = τ² · mean over *B of Σ_classes p ln(p / q)
        p = softmax(teacher / τ),  q = softmax(student / τ)

    Gradients with respect to logits scale as 1/τ²; the factor τ² keeps their size independent of
    the temperature.

    Args:
        teacher_logits: `[*B, classes]`; a logit of -inf excludes its class.
        student_logits: `[*B, classes]`.
        temperature: τ, positive.
        where: bool, broadcastable to `[*B]`: the positions that the mean includes.
        teacher_gradient: whether to differentiate with respect to the teacher.

    Returns:
        A scalar, float32 at least; 0 if no position is included.

    Raises:
        ValueError: shapes that differ, a temperature that is not positive.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.distillation import logit_distillation
        >>> teacher, student = jnp.array([[2.0, 0.0, -1.0]]), jnp.array([[1.0, 0.0, -1.0]])
        >>> def steepest(temperature):
        ...     loss = lambda x: logit_distillation(teacher, x, temperature=temperature)
        ...     return jnp.abs(jax.grad(loss)(student)).max()
        >>> [f"{steepest(t):.4f}" for t in (1.0, 4.0, 10.0)]
        ['0.1786', '0.2472', '0.2353']

    References:
        Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network",
        arXiv:1503.02531, §2, eq. 2.
    """
    for name, x in (("teacher_logits", teacher_logits), ("student_logits", student_logits)):
        check_floating(name, as_array(name, x))
    if teacher_logits.shape != student_logits.shape or teacher_logits.ndim < 1:
        raise ValueError(
            f"teacher_logits {list(teacher_logits.shape)} and student_logits "
            f"{list(student_logits.shape)} must have the same shape [*B, classes]"
        )
    if is_concrete(temperature) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _soft_targets(teacher_logits, student_logits, where, temperature, teacher_gradient)


@functools.partial(jax.jit, static_argnames=("teacher_gradient",))
def _soft_targets(
    teacher: Any, student: Any, where: Any, temperature: Any, teacher_gradient: bool
) -> Array:
    teacher = teacher if teacher_gradient else jax.lax.stop_gradient(teacher)
    dtype = stats_dtype(teacher.dtype, student.dtype)
    both = [widen(x).astype(dtype) for x in (teacher, student)]
    if where is not None:  # before the softmax: excluded positions may be NaN
        both = [jnp.where(_rows_where(where, x.shape[:-1])[..., None], x, 0) for x in both]
    temperature = jnp.asarray(temperature, dtype)
    log_p, log_q = (_log_softmax(x / temperature) for x in both)
    rows = jnp.sum(terms("kl", log_p, log_q).value, axis=-1)
    return _mean(rows, where) * temperature**2


def _log_softmax(x: Array) -> Array:
    lse, _ = log_sum_exp(x, None)
    return x - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]


def hidden_state_transfer(
    teacher_states: TeacherStates,
    student_states: StudentStates,
    projection: Annotated[Any, Float[Array, "Ds Dt"]] | None = None,
    *,
    kind: str = "mse",
    where: Where | None = None,
    teacher_gradient: bool = False,
) -> Float[Array, ""]:
    """Distance between the teacher's hidden states and the projected states of the student.

        mse     mean of (student W - teacher)²
        cosine  mean of 1 - cos(student W, teacher)

    Args:
        teacher_states: `[*B, Dt]`, batch and length in front.
        student_states: `[*B, Ds]`.
        projection: W `[Ds, Dt]`, trained with the student; None if Ds = Dt.
        kind: "mse" or "cosine".
        where: bool, broadcastable to `[*B]`: the positions that the mean includes.
        teacher_gradient: whether to differentiate with respect to the teacher.

    Returns:
        A scalar, float32 at least; 0 if no position is included.

    Raises:
        ValueError: different widths without a projection, a projection of another shape.

    References:
        Jiao et al. 2020, "TinyBERT", arXiv:1909.10351, eq. 8.
        Sanh et al. 2019, "DistilBERT", arXiv:1910.01108, §3 (cosine).
    """
    check_choice("kind", kind, "mse", "cosine")
    for name, x in (("teacher_states", teacher_states), ("student_states", student_states)):
        check_floating(name, as_array(name, x))
    widths = student_states.shape[-1], teacher_states.shape[-1]
    if teacher_states.shape[:-1] != student_states.shape[:-1]:
        raise ValueError(
            f"teacher_states {list(teacher_states.shape)} and student_states "
            f"{list(student_states.shape)} must agree in all axes but the last"
        )
    if projection is None and widths[0] != widths[1]:
        raise ValueError(
            f"student_states have {widths[0]} features and teacher_states {widths[1]}: give a "
            f"projection {list(widths)}"
        )
    if projection is not None and tuple(projection.shape) != widths:
        raise ValueError(
            f"projection has shape {list(projection.shape)} but must be "
            f"[student features, teacher features] = {list(widths)}"
        )
    if not teacher_gradient:
        teacher_states = jax.lax.stop_gradient(jnp.asarray(teacher_states))
    dtype = stats_dtype(teacher_states.dtype, student_states.dtype)
    if where is not None:  # before any product: excluded positions may be NaN
        teacher_states, student_states = (
            jnp.where(_rows_where(where, x.shape[:-1])[..., None], x, jnp.ones((), x.dtype))
            for x in (teacher_states, student_states)
        )
    projected = student_states if projection is None else matmul(student_states, projection)
    ours, theirs = widen(projected).astype(dtype), widen(teacher_states).astype(dtype)
    if kind == "mse":
        return _mean(jnp.mean((ours - theirs) ** 2, axis=-1), where)
    return _mean(1 - jnp.sum(_unit(ours) * _unit(theirs), axis=-1), where)


def _unit(x: Array) -> Array:
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    return jnp.where(square == 0, 0, x * jax.lax.rsqrt(jnp.where(square == 0, 1, square)))


def value_relation(
    teacher_value: Values,
    student_value: Values,
    *,
    relation_heads: int | None = None,
    teacher_mask: AnyMask = None,
    student_mask: AnyMask = None,
    **options: Any,
) -> Float[Array, "*B N T"]:
    """Divergence between the value relations of teacher and student.

        D_t = KL( softmax_s(v_t · v_s / √V) of the teacher || of the student )

    V may differ between the models, and with `relation_heads` the numbers of heads may differ too.

    Args:
        teacher_value: `[*B, T, M, V]`.
        student_value: `[*B, T, N, V]`.
        relation_heads: the number of heads to split both values into; None keeps their heads.
        teacher_mask: visible pairs, as `mask` of `attend`; for padding, commonly.
        student_mask: the same for the student.
        **options: `kind`, `head_map`, `teacher_gradient`, `block_size` and `precision` of
            `attention_divergence`.

    Returns:
        `[*B, N, T]`, N the number of relation heads if given.

    Raises:
        ValueError: a width that is not a multiple of `relation_heads`; and as in
            `attention_divergence`.

    References:
        Wang et al. 2020, "MiniLM", arXiv:2002.10957, eq. 4-5.
        Wang et al. 2021, "MiniLMv2", arXiv:2012.15828, §3.1 (relation heads).
    """
    teacher_value, student_value = (
        _split_anew(name, x, relation_heads)
        for name, x in (("teacher_value", teacher_value), ("student_value", student_value))
    )
    return attention_divergence(
        (teacher_value, teacher_value),
        (student_value, student_value),
        teacher_mask=teacher_mask,
        student_mask=student_mask,
        **options,
    )


def _split_anew(name: str, x: Any, heads: int | None) -> Any:
    check_floating(name, as_array(name, x))
    if x.ndim < 3:
        raise ValueError(f"{name} must be [*B, T, N, V], got {list(x.shape)}")
    if heads is None:
        return x
    width = x.shape[-1] * x.shape[-2]
    if width % check_count("relation_heads", heads, 1):
        raise ValueError(f"{name}: width {width} (N·V) is not a multiple of relation_heads {heads}")
    return x.reshape(*x.shape[:-2], heads, width // heads)


def _rows_where(where: Any, shape: Shape) -> Array:
    if as_array("where", where).dtype != np.bool_:
        raise TypeError(f"where must be boolean, got dtype {np.dtype(where.dtype).name}")
    return jnp.broadcast_to(jnp.asarray(where), shape)


def _mean(rows: Array, where: Any) -> Array:
    """The mean over the included positions; 0 without any."""
    if where is None:
        return jnp.sum(rows) / max(rows.size, 1)
    counts = _rows_where(where, rows.shape)
    return jnp.sum(jnp.where(counts, rows, 0)) / jnp.maximum(jnp.sum(counts, dtype=rows.dtype), 1)
