"""Tests for attention functions: a float64 reference, a conformance suite, Hypothesis strategies.

`reference_attention` and `reference_gradients` use NumPy only and share no code with the library.
`check_attention(f, supports=...)` runs the suite of our own kernels on any function with the
signature of `attend`. `strategies` needs Hypothesis, and is imported on first use.
"""

from types import ModuleType
from typing import TYPE_CHECKING

from attention_jax.testing import reference_scores as reference_scores
from attention_jax.testing.conformance import FEATURES as FEATURES
from attention_jax.testing.conformance import check_attention as check_attention
from attention_jax.testing.problems import Problem as Problem
from attention_jax.testing.problems import Sizes as Sizes
from attention_jax.testing.problems import random_problem as random_problem
from attention_jax.testing.reference import Gradients as Gradients
from attention_jax.testing.reference import Reference as Reference
from attention_jax.testing.reference import reference_attention as reference_attention
from attention_jax.testing.reference import reference_gradients as reference_gradients
from attention_jax.testing.reference_scores import RowScore as RowScore

if TYPE_CHECKING:
    from attention_jax.testing import strategies as strategies


def __getattr__(name: str) -> ModuleType:
    if name == "strategies":
        import importlib

        return importlib.import_module("attention_jax.testing.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
