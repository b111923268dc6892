"""The targets of the student's heads: averages over teacher heads.

    p_n(t, s) = Σ_m a_nm p_m(t, s),   Σ_m a_nm = 1

With equal numbers of heads, the target of head n is head n. If the teacher has more, it is the mean
of M / N adjacent heads; if it has fewer, N / M student heads share a target. Otherwise `a [N, M]`
is given, possibly learned.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Layout
from attention_jax._core.checks import as_array, check_floating
from attention_jax._core.leading_axes import join_head_axes
from attention_jax._core.numerics import is_concrete, through_float32
from attention_jax.kernels.problem import Problem


class Pairs(NamedTuple):
    """The student's problem and the teacher's, with leading axes `[*B, N]`.

    Attributes:
        student: leaves `[*#B, #N, ...]`.
        teacher: leaves `[*#B, #N, #M, ...]`, M teacher heads for each student head.
        share: weights of the teacher heads `[..., N, M]`; None for M = 1.
    """

    student: Problem
    teacher: Problem
    share: Any


def shares(head_map: Any, students: int, teachers: int) -> tuple[np.ndarray, Any]:
    """Indices of the teacher heads `[N, M]` of each student head; their weights, or None."""
    if head_map is not None:
        return np.tile(np.arange(teachers), (students, 1)), _checked(head_map, students, teachers)
    if students % teachers == 0:
        return (np.arange(students) // (students // teachers))[:, None], None
    if teachers % students == 0:
        heads = np.arange(teachers).reshape(students, -1)
        return heads, np.full(heads.shape, 1 / heads.shape[1], np.float32)
    raise ValueError(
        f"neither of the numbers of heads of teacher ({teachers}) and student ({students}) is a "
        "multiple of the other: give head_map, [student heads, teacher heads], with rows that sum "
        "to 1"
    )


def _checked(head_map: Any, students: int, teachers: int) -> Any:
    check_floating("head_map", as_array("head_map", head_map))
    if tuple(head_map.shape) != (students, teachers):
        raise ValueError(
            f"head_map has shape {list(head_map.shape)} but must be [student heads, teacher heads] "
            f"= {[students, teachers]}"
        )
    if is_concrete(head_map):
        weights = np.asarray(head_map, np.float64)
        if (weights < 0).any() or not np.allclose(weights.sum(1), 1, atol=1e-2):
            raise ValueError(
                "head_map must be non-negative, with every row summing to 1; got sums "
                f"{np.round(weights.sum(1), 4).tolist()} and a smallest entry of "
                f"{weights.min():.4g}: apply a softmax to learned logits"
            )
    return head_map


def pair_up(
    student: tuple[Problem, Layout], teacher: tuple[Problem, Layout], heads: np.ndarray, share: Any
) -> Pairs:
    """Pairs two problems with leading axes `[*B, K, G]`.

    Args:
        student: the problem and its layout.
        teacher: the problem and its layout.
        heads: indices of the teacher heads of each student head, `[N, M]`.
        share: their weights `[N, M]`, or None.
    """
    rank = len(student[1].batch)
    same = np.array_equal(heads, np.arange(teacher[1].N)[:, None])

    def choose(x: Any) -> Any:
        if x.shape[rank] == 1 or same:
            return jnp.expand_dims(x, rank + 1)
        return through_float32(lambda x: jnp.take(x, heads, axis=rank), x)

    if share is not None:
        share = jnp.asarray(share)
        share = share.reshape((1,) * rank + share.shape)
    ours, theirs = join_head_axes(student[0], student[1]), join_head_axes(teacher[0], teacher[1])
    return Pairs(ours, jax.tree.map(choose, theirs), share)
