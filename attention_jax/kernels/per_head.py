"""Lower a request for a blocked kernel, and map a function of one head over all heads."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from attention_jax._core.leading_axes import map_leading
from attention_jax.kernels.block import dtypes_of
from attention_jax.kernels.problem import Problem, Static, block_kinds, lower
from attention_jax.kernels.request import Request
from attention_jax.kernels.tiling import Tiling
from attention_jax.kernels.traced import trace_user_code


class Heads(NamedTuple):
    """All heads of all examples, in blocks.

    Attributes:
        problem: the problem, with leading axes `facts.sizes`.
        kinds: the kinds of blocks, NumPy `[nT, nS]` or traced `[*#sizes, nT, nS]`.
        dtypes: the dtypes of the problem's leaves, to which blocks are cast.
        facts: the static facts.
        tiling: the tiling.
    """

    problem: Problem
    kinds: Any
    dtypes: Problem
    facts: Static
    tiling: Tiling

    def map(self, function: Callable[[Any, Problem], Any]) -> Any:
        """Maps `function(kinds, head)` over all heads, with kinds `[nT, nS]`."""
        facts, loop = self.facts, self.tiling.loop
        if isinstance(self.kinds, np.ndarray):
            of_head = functools.partial(function, self.kinds)
            return map_leading(of_head, self.problem, facts.sizes, loop=loop)
        both = self.kinds, self.problem
        return map_leading(lambda parts: function(*parts), both, facts.sizes, loop=loop)


def lower_heads(request: Request, tiling: Tiling, *, merge: bool = False) -> Heads:
    """The heads of a request; `merge` joins their leading axes."""
    problem, facts = lower(request, merge=merge)
    kinds = block_kinds(problem, facts, tiling)
    problem = trace_user_code(problem, facts, tiling.block)
    return Heads(problem, kinds, dtypes_of(problem), facts, tiling)
