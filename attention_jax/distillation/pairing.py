"""Which of the teacher's heads each head of the student learns from.

    p_n(t, s) = Σ_m a_nm p_m(t, s),   Σ_m a_nm = 1

With as many heads, head n learns from head n. With more, the student's head learns from the mean of
its share of the teacher's; with fewer, several heads learn from one. A map `a [N, M]` says it
otherwise, and may be learned.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Layout
from attention_jax._core.checks import as_array, check_floating
from attention_jax._core.numerics import is_concrete
from attention_jax.kernels.heads import join_head_axes
from attention_jax.kernels.problem import Problem


class Pairs(NamedTuple):
    """The student's problem and the teacher's, side by side, behind the axes `[*B, N]`.

    Attributes:
        student: leaves `[*#B, #N, ...]`.
        teacher: leaves `[*#B, #N, #M, ...]`: M heads for each of the student's.
        share: the teacher's heads' shares `[..., N, M]`; None for a single head.
    """

    student: Problem
    teacher: Problem
    share: Any


def shares(head_map: Any, students: int, teachers: int) -> tuple[np.ndarray, Any]:
    """The teacher's heads `[N, M]` for each of the student's, and their shares `[N, M]` or None."""
    if head_map is not None:
        return np.tile(np.arange(teachers), (students, 1)), _checked(head_map, students, teachers)
    if students % teachers == 0:
        return (np.arange(students) // (students // teachers))[:, None], None
    if teachers % students == 0:
        heads = np.arange(teachers).reshape(students, -1)
        return heads, np.full(heads.shape, 1 / heads.shape[1], np.float32)
    raise ValueError(
        f"the teacher's heads ({teachers}) and the student's ({students}) are no multiples of one "
        "another: give head_map, [student heads, teacher heads], whose rows sum to 1"
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
                "head_map must hold weights: none negative, and every row summing to 1, here "
                f"{np.round(weights.sum(1), 4).tolist()} with least entry {weights.min():.4g}; "
                "take the softmax of what is learned"
            )
    return head_map


def pair_up(
    student: tuple[Problem, Layout], teacher: tuple[Problem, Layout], heads: np.ndarray, share: Any
) -> Pairs:
    """Puts the two problems, with leading axes `[*B, K, G]`, side by side.

    Args:
        student: the problem and its sizes.
        teacher: the problem and its sizes.
        heads: the teacher's heads for each of the student's, `[N, M]`.
        share: their shares `[N, M]`, or None.
    """
    rank = len(student[1].batch)
    every = np.arange(teacher[1].N)
    same = heads.shape[1] == 1 and np.array_equal(heads[:, 0], every)

    def choose(x: Any) -> Any:
        if x.shape[rank] == 1 or same:
            return jnp.expand_dims(x, rank + 1)
        return jnp.take(x, heads, axis=rank)

    if share is not None:
        share = jnp.asarray(share)
        share = share.reshape((1,) * rank + share.shape)
    own, its = join_head_axes(student[0], student[1]), join_head_axes(teacher[0], teacher[1])
    return Pairs(own, jax.tree.map(choose, its), share)
