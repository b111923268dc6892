"""Detect user functions and objects in the static part of a tree.

JAX caches what it traces by the identity of its functions, and keeps them alive. That is right
for functions of JAX, Flax and this library, which depend on their arguments alone. A caller's
function may read an attribute, a global or a closure that has changed since it was traced.
"""

import functools
import sys
import types
from typing import Any

import jax
import numpy as np

# Top-level modules whose functions depend only on their arguments.
_LIBRARIES = frozenset(
    {"attention_jax", "builtins", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "optax"}
)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...), slice, range)
_ARRAYS = (jax.Array, np.ndarray, np.generic, np.dtype)


def holds_user_code(tree: Any) -> bool:
    """Whether a tree holds a function, a class or an object that a caller wrote.

    Arrays and numbers are data. Functions are followed into their closures, defaults and bound
    objects; objects into their attributes.
    """
    return _is_foreign(tree, {})


def _is_foreign(x: Any, met: dict[int, Any]) -> bool:
    if type(x) in _PLAIN or isinstance(x, _ARRAYS) or id(x) in met:
        return False
    met[id(x)] = x  # kept, so that no later object has its id
    if callable(x) and is_library_function(x):
        return False
    return _top_level(x) not in _LIBRARIES or any(_is_foreign(part, met) for part in _parts(x))


def is_library_function(x: Any) -> bool:
    """Whether `x` is a function or class that is a global of a library, such as `jnp.tanh`."""
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    if not isinstance(module, str) or not is_library_module(module):
        return False
    # the attributes alone are not sufficient: `functools.wraps` copies them from another function
    return getattr(sys.modules.get(module), str(name), None) is x


def is_library_module(name: str) -> bool:
    """Whether a module belongs to JAX, Flax, NumPy, Optax or this library."""
    return name.partition(".")[0] in _LIBRARIES


def _top_level(x: Any) -> str:
    """The top-level module in which the code of `x` is written."""
    if isinstance(x, types.FunctionType):
        name = x.__globals__.get("__name__", "")
    elif isinstance(x, type):
        name = x.__module__
    elif isinstance(x, functools.partial):
        name = ""  # made by the caller, and equal to no other
    elif isinstance(x, types.BuiltinFunctionType):
        return "builtins" if isinstance(x.__self__, types.ModuleType | types.NoneType) else ""
    else:
        name = type(x).__module__
    return name.partition(".")[0]


def _parts(x: Any) -> list[Any]:
    """The components of `x` that may contain user code."""
    if isinstance(x, type | types.BuiltinFunctionType):
        return []
    if isinstance(x, jax.tree_util.PyTreeDef):
        return [jax.tree.unflatten(x, [None] * x.num_leaves)]
    if isinstance(x, dict):
        return [*x.keys(), *x.values()]
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, types.FunctionType):
        cells = [_content(cell) for cell in x.__closure__ or ()]
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        return [*cells, *defaults]
    slots = {name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())}
    found = [getattr(x, name, None) for name in slots - {"__weakref__", "__dict__"}]
    return [*found, *getattr(x, "__dict__", {}).values(), getattr(x, "__wrapped__", None)]


def _content(cell: Any) -> Any:
    """A closure's value, None while it has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
