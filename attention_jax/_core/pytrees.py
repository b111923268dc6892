"""Frozen records: pytrees whose repr is the call that made them.

Every choice a user makes (a score, a mask, a bias) is such a record. Array parameters are pytree
leaves, so they pass through jit, vmap and grad; everything else is static and hashable. An exported
function that takes or returns records can be serialized.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.core
import jax.export
import numpy as np

from attention_jax._core import serial

Class = TypeVar("Class", bound=type)


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure and not a leaf of it."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static,))
def pytree(cls: Class) -> Class:
    """Makes a class a frozen dataclass, a pytree node, and serializable by `jax.export`.

    Fields are children of the node unless they are `static`.
    """
    cls = dataclasses.dataclass(frozen=True, repr=False, eq=False)(cls)
    jax.tree_util.register_dataclass(cls)
    names = tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("static"))
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=serial.name_of(cls),
        serialize_auxdata=lambda aux: serial.dump(cls, names, aux),
        deserialize_auxdata=serial.load,
    )
    return cls


def serializable_tuple(cls: Class) -> Class:
    """Makes a NamedTuple serializable by `jax.export`."""
    return jax.export.register_namedtuple_serialization(cls, serialized_name=serial.name_of(cls))


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


@pytree
class Bound(Record):
    """A function with some of its arguments; arrays among these are leaves.

    Attributes:
        function: the function, static.
        args: its first positional arguments.
        keywords: its keyword arguments.
    """

    function: Callable[..., Any] = static()
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Bound":
        """The function; a `jax.tree_util.Partial` with the arguments that it carries."""
        if isinstance(function, jax.tree_util.Partial):
            return cls(function.func, function.args, function.keywords)
        return cls(function)

    def __call__(self, *args: Any) -> Any:
        """Calls the function with these arguments appended."""
        return self.function(*self.args, *args, **self.keywords)


class Partition(NamedTuple):
    """The structure of a tree, and which of its leaves are chosen; hashable."""

    structure: Any
    chosen: tuple[bool, ...]

    def join(self, chosen: Iterable[Any], others: Iterable[Any]) -> Any:
        """The tree of these leaves."""
        some, rest = iter(chosen), iter(others)
        return jax.tree.unflatten(self.structure, [next(some if x else rest) for x in self.chosen])


def partition(tree: Any, flags: Iterable[bool]) -> tuple[list[Any], list[Any], Partition]:
    """The leaves whose flag is set, the other leaves, and the function that joins them."""
    leaves, structure = jax.tree.flatten(tree)
    chosen = tuple(bool(flag) for flag in flags)
    some = [x for x, flag in zip(leaves, chosen, strict=True) if flag]
    rest = [x for x, flag in zip(leaves, chosen, strict=True) if not flag]
    return some, rest, Partition(structure, chosen)


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    return np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))
