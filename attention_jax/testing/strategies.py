"""Hypothesis strategies for attention: sizes, masks, biases, dtypes and whole problems.

Entries come from NumPy with a drawn seed, so that examples shrink in shape and not in every entry.

    from hypothesis import given

    @given(problem=aj.testing.strategies.problems())
    def test_my_kernel(problem):
        out = my_kernel(problem.query, problem.key, problem.value, mask=problem.mask)
        np.testing.assert_allclose(out, problem.reference().out, rtol=1e-5, atol=1e-5)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attention_jax.testing.problems import Problem, Sizes, random_problem
from attention_jax.testing.reference_scores import SCORES as NAMED_SCORES

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "attention_jax.testing.strategies needs Hypothesis: pip install hypothesis"
    ) from error

SCORES = tuple(NAMED_SCORES)


@st.composite
def sizes(
    draw: Any,
    *,
    max_length: int = 19,
    max_depth: int = 9,
    lengths: Sequence[int] | None = None,
    batches: Sequence[tuple[int, ...]] = ((2,), (), (1, 3)),
) -> Sizes:
    """Sizes of a problem; T ≠ S, V ≠ H and grouped heads are likely.

    Args:
        draw: passed by Hypothesis.
        max_length: largest T and S.
        max_depth: largest H, V and A.
        lengths: values of T and S; a short list needs fewer compilations.
        batches: values of `*B`.
    """
    length = st.integers(1, max_length) if lengths is None else st.sampled_from(lengths)
    depth = st.integers(1, max_depth)
    kv_heads = draw(st.integers(1, 3))
    return Sizes(
        batch=draw(st.sampled_from(batches)),
        T=draw(length),
        S=draw(length),
        N=kv_heads * draw(st.integers(1, 3)),
        K=kv_heads,
        H=draw(depth),
        V=draw(depth),
        A=draw(depth),
    )


@st.composite
def pair_shapes(draw: Any, size: Sizes) -> tuple[int, ...]:
    """A shape that broadcasts to `[*B, N, T, S]`, with axes of size 1 or fewer axes."""
    shape = tuple(draw(st.sampled_from((1, n))) for n in size.pairs)
    return shape[draw(st.integers(0, len(shape))) :]


@st.composite
def masks(draw: Any, size: Sizes, *, empty_rows: bool = True) -> np.ndarray:
    """A boolean mask broadcasting to `[*B, N, T, S]`, from all False to all True.

    Args:
        draw: passed by Hypothesis.
        size: sizes of the problem.
        empty_rows: whether queries may have no visible keys.
    """
    shape = draw(pair_shapes(size))
    if len(shape) == len(size.pairs) - 1:
        shape = (1, *shape)  # without it the first axes may fit *B as well, which attend refuses
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mask = rng.random(shape) < draw(st.sampled_from((0.0, 0.3, 0.7, 1.0)))
    if not empty_rows and not mask.ndim:
        return np.ones_like(mask)
    if not empty_rows and mask.size:
        visible = rng.integers(shape[-1], size=shape[:-1])
        np.put_along_axis(mask, visible[..., None], True, axis=-1)
    return np.asarray(mask)


@st.composite
def biases(
    draw: Any, size: Sizes, *, minus_infinity: bool = True, dtype: str = "float32"
) -> np.ndarray:
    """A bias broadcasting to `[*B, N, T, S]`.

    Args:
        draw: passed by Hypothesis.
        size: sizes of the problem.
        minus_infinity: whether entries may be -inf, which masks the pair.
        dtype: dtype of the bias.
    """
    shape = draw(pair_shapes(size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bias = np.asarray(draw(st.sampled_from((0.0, 1.0, 5.0))) * rng.normal(size=shape))
    if minus_infinity and draw(st.booleans()):
        bias = np.where(rng.random(shape) < 0.3, -np.inf, bias)
    return np.asarray(bias).astype(np.dtype(dtype))


def dtypes(names: Sequence[str] = ("float32", "bfloat16", "float16")) -> st.SearchStrategy[str]:
    """The name of a dtype; float64 is left out, since JAX disables it by default."""
    return st.sampled_from(names)


@st.composite
def problems(
    draw: Any,
    *,
    size: st.SearchStrategy[Sizes] | None = None,
    scores: Sequence[str] = ("scaled_dot",),
    dtype: st.SearchStrategy[str] | None = None,
    empty_rows: bool = True,
    minus_infinity: bool = True,
) -> Problem:
    """A problem: inputs, a score with parameters, and possibly a mask and a bias.

    Args:
        draw: passed by Hypothesis.
        size: a strategy for sizes, by default `sizes()`.
        scores: names of scores from `SCORES`.
        dtype: a strategy for names of dtypes, by default "float32".
        empty_rows: whether queries may have no visible keys.
        minus_infinity: whether a bias may contain -inf, and so make a row empty.
    """
    drawn = draw(sizes() if size is None else size)
    kind = draw(st.just("float32") if dtype is None else dtype)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = random_problem(
        rng, drawn, score=draw(st.sampled_from(scores)), per_head=draw(st.booleans()), dtype=kind
    )
    if draw(st.booleans()):
        problem = replace(problem, mask=draw(masks(drawn, empty_rows=empty_rows)))
    if draw(st.booleans()):
        infinite = minus_infinity and empty_rows
        bias = biases(drawn, minus_infinity=infinite, dtype="float32").map(
            lambda x: x.astype(problem.query.dtype)
        )
        problem = replace(problem, bias=draw(bias))
    return problem
