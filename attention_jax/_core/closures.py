"""What a function that somebody wrote inside another one has taken along from there.

A rule of differentiation sees a function's arguments and nothing else. Of a traced value that a
score, an activation or a mask has in its closure it would know no derivative: zero, silently.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.core


def holds_tracer(tree: Any) -> bool:
    """Whether something static in a pytree holds a traced value; its leaves do not count."""
    leaves, structure = jax.tree.flatten(tree)
    return _holds_tracer(jax.tree.unflatten(structure, [None] * len(leaves)), set())


def _holds_tracer(x: Any, met: set[int]) -> bool:
    if isinstance(x, jax.core.Tracer):
        return True
    if id(x) in met:
        return False
    met.add(id(x))
    return any(_holds_tracer(part, met) for part in _parts(x))


def _parts(x: Any) -> list[Any]:
    """What `x` is made of, where a value may hide."""
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        cells = [_content(cell) for cell in x.__closure__ or ()]
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return [*cells, *defaults, getattr(x, "__wrapped__", None)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return [getattr(x, field.name) for field in dataclasses.fields(x)]
    if callable(x) and not isinstance(x, type | types.ModuleType | types.BuiltinFunctionType):
        return [*getattr(x, "__dict__", {}).values()]
    return []


def _content(cell: Any) -> Any:
    """A closure's value, None while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
