"""Hypothesis strategies, and `attend` on the problems they draw."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given

import attention_jax as aj
from attention_jax.testing import strategies


@pytest.mark.thorough
@given(problem=strategies.problems(scores=strategies.SCORES, dtype=strategies.dtypes()))
def test_a_drawn_problem_has_a_reference(problem):
    ref = problem.reference()
    assert ref.out.shape == (*problem.query.shape[:-1], problem.value.shape[-1])
    total = ref.weights.sum(axis=-1)
    np.testing.assert_allclose(total, np.isfinite(ref.lse).astype(float), atol=1e-12)


@given(problem=strategies.problems(empty_rows=False))
def test_empty_rows_can_be_excluded(problem):
    assert np.all(np.isfinite(problem.reference().lse))


LENGTHS = strategies.sizes(lengths=(1, 7), max_depth=3, batches=((2,),))


@given(problem=strategies.problems(size=LENGTHS, scores=strategies.SCORES))
def test_attend_agrees_with_the_reference(problem):
    score = getattr(aj.scores, problem.score)(**problem.params)
    out = aj.attend(
        problem.query, problem.key, problem.value, score=score, mask=problem.mask, bias=problem.bias
    )
    np.testing.assert_allclose(out, problem.reference().out, rtol=1e-5, atol=2e-5)


def test_hypothesis_is_imported_on_first_use():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import attention_jax as aj\n"
        "try:\n    aj.testing.strategies\n"
        "except ImportError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        run.stdout == "attention_jax.testing.strategies needs Hypothesis: pip install hypothesis\n"
    )
