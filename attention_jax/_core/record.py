"""Frozen records: pytrees whose repr is the call that made them.

Every choice a user makes (a score, a mask, a bias) is such a record. Array parameters are pytree
leaves, so they pass through jit, vmap and grad; everything else is static and hashable.
"""

import dataclasses
from typing import Any

import jax
import jax.core
import numpy as np


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure and not a leaf of it."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def _show(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype") and np.ndim(value):
        return f"{np.dtype(value.dtype).name}[{', '.join(map(str, value.shape))}]"
    if callable(value) and not isinstance(value, Record):
        return getattr(value, "__name__", repr(value))
    return repr(value)


class Record:
    """Base of the frozen dataclasses of this library.

    Two records are equal when they have the same structure and equal leaves; under a
    transformation, where values are not known, the same tracers.
    """

    def _call(self) -> tuple[str, dict[str, Any]]:
        """The factory's name and the arguments to show; `{}` values that are None are left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return type(self).__name__.lower(), fields

    def __repr__(self) -> str:
        name, arguments = self._call()
        shown = (f"{k}={_show(v)}" for k, v in arguments.items() if v is not None)
        return f"{name}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, structure = jax.tree.flatten(self)
        theirs, other_structure = jax.tree.flatten(other)
        return structure == other_structure and all(map(_same, mine, theirs))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    return np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
