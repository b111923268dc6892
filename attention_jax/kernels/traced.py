"""Trace user functions once per call and replace them by their programs (jaxprs).

A kernel evaluates the same block function in its forward pass and in its derivative rule, which JAX
may run long after the call. The user's function may have changed by then, and a rule has no
derivative with respect to captured values. A program is constant, and captured values are its
inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.mesh_axes import vary_as
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides, Term
from attention_jax._core.user_code import holds_user_code
from attention_jax.kernels.block import cut
from attention_jax.kernels.problem import Problem, Static, part
from attention_jax.masks.mask import Mask, View, spread


class Program(NamedTuple):
    """A traced function of arrays; hashable."""

    jaxpr: Any
    rows: int
    keys: int

    def __call__(self, captured: Any, *arguments: Any) -> Array:
        """The result for these values, cast to the dtypes of tracing (`narrow`)."""

        def cast(variables: Any, values: Any) -> list[Any]:
            return [x.astype(v.aval.dtype) for v, x in zip(variables, values, strict=True)]

        constants = cast(self.jaxpr.constvars, captured)
        leaves = cast(self.jaxpr.invars, jax.tree.leaves(arguments))
        return jax.core.eval_jaxpr(self.jaxpr, constants, *leaves)[0]


@pytree
class TracedTerm(Term):
    """A term whose block function is a program for each size of block that occurs."""

    parameters: Any
    captured: Any
    programs: tuple[Program, ...] = static()
    hides: bool = static()
    overflows: bool = static()

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The program's result."""
        size = query_positions.shape[0], key_positions.shape[0]
        index = next(i for i, x in enumerate(self.programs) if (x.rows, x.keys) == size)
        program, captured = self.programs[index], self.captured[index]
        return program(captured, self.parameters, sides, query_positions, key_positions)

    @property
    def may_hide(self) -> bool:
        """As the term that was traced."""
        return self.hides

    @property
    def may_overflow(self) -> bool:
        """As the term that was traced."""
        return self.overflows


@pytree
class TracedMask(Mask):
    """A mask whose block function is a program."""

    parameters: Any
    captured: Any
    program: Program = static()

    def allowed(self, view: View) -> Array:
        """The program's result."""
        return self.program(self.captured, self.parameters, view)


def trace_user_code(problem: Problem, facts: Static, block: tuple[int, int]) -> Problem:
    """The problem with user functions replaced by programs, for blocks of this size.

    Args:
        problem: as `lower` returns it, with leading axes `facts.sizes`.
        facts: its static facts.
        block: (query, key) size of a block.
    """
    own_term, own_mask = (holds_user_code(x) for x in (problem.term, problem.mask))
    if own_term:
        sizes = [block, (1, 1)] if facts.statistics else [block]
        captured, programs = zip(
            *(_traced(problem, facts, size, _TERM) for size in dict.fromkeys(sizes)),
            strict=True,
        )
        term = problem.term
        new = TracedTerm(
            jax.tree.leaves(term), captured, programs, term.may_hide, term.may_overflow
        )
        problem = problem._replace(term=new)
    if own_mask:
        captured, program = _traced(problem, facts, block, _MASK)
        mask = TracedMask(jax.tree.leaves(problem.mask), captured, program)
        problem = problem._replace(mask=mask)
    return problem


class _Function(NamedTuple):
    """A part of a block's evaluation: the block's arrays that it uses, and the call."""

    operands: Callable[[Problem], Any]
    call: Callable[[Problem, Any], Array]


def _operands_of_term(block: Problem) -> Any:
    positions = part(block.sides, "position")
    return jax.tree.leaves(block.term), part(block.sides, "term"), positions.query, positions.key


def _operands_of_mask(block: Problem) -> Any:
    positions = spread(part(block.sides, "position"))
    view = View(spread(part(block.sides, "mask")), positions.query, positions.key)
    return jax.tree.leaves(block.mask), view


def _block_of_term(problem: Problem, operands: Any) -> Array:
    term = jax.tree.unflatten(jax.tree.structure(problem.term), operands[0])
    return term.block(*operands[1:])


def _block_of_mask(problem: Problem, operands: Any) -> Array:
    mask = jax.tree.unflatten(jax.tree.structure(problem.mask), operands[0])
    return jnp.asarray(mask.allowed(operands[1]))


_TERM = _Function(_operands_of_term, _block_of_term)
_MASK = _Function(_operands_of_mask, _block_of_mask)


def _traced(
    problem: Problem, facts: Static, block: tuple[int, int], function: _Function
) -> tuple[list[Array], Program]:
    """The values captured by the function, with leading axes of size 1, and its program."""
    leaves, structure = jax.tree.flatten(problem)
    lead = len(facts.sizes)
    structures: list[Any] = []

    def operands(leaves: list[Any]) -> list[Any]:
        one_head = [x[(0,) * lead] for x in leaves]
        head = cut(jax.tree.unflatten(structure, one_head), facts, block, 0, 0)
        flat, flat_structure = jax.tree.flatten(function.operands(head))
        structures.append(flat_structure)
        return flat

    shapes = jax.eval_shape(operands, leaves)
    closed = jax.make_jaxpr(
        lambda *flat: function.call(problem, jax.tree.unflatten(structures[-1], flat))
    )(*shapes)
    captured = [jnp.asarray(x).reshape((1,) * lead + x.shape) for x in closed.consts]
    return vary_as(captured, leaves), Program(closed.jaxpr, *block)
