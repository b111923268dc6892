"""Static data of pytree nodes as JSON, for functions that `jax.export` serializes.

No code is stored: a function or a class is written as the name of a module of the libraries and
its own name there.
"""

import dataclasses
import importlib
import json
from typing import Any

import numpy as np

from attention_jax._core.user_code import is_library_function, is_library_module

_PLAIN = (str, int, float, bool, type(None))


def name_of(cls: type) -> str:
    """The name under which nodes of a class are serialized, `attention_jax.masks.Causal`."""
    library, part, *_ = cls.__module__.split(".")
    return f"{library}.{part}.{cls.__qualname__}"


def dump(cls: type, names: tuple[str, ...], values: tuple[Any, ...]) -> bytes:
    """Static values of a node, by the names of their fields.

    Raises:
        TypeError: a value that holds a caller's function or object.
    """
    encoded = []
    for name, value in zip(names, values, strict=True):
        try:
            encoded.append(_encoded(value))
        except _NotData as error:
            raise TypeError(
                f"cannot serialize {error} ({name} of {name_of(cls)}): it is code of yours, and "
                "not data. Build the object that holds it inside the exported function, and take "
                "its arrays as arguments"
            ) from None
    return json.dumps(encoded).encode()


def load(data: bytes) -> tuple[Any, ...]:
    """The values that `dump` wrote."""
    return tuple(_decoded(x) for x in json.loads(bytes(data).decode()))


class _NotData(Exception):
    """A value that is not data; its text names it."""


def _encoded(x: Any) -> Any:
    if type(x) in _PLAIN:
        return x
    if type(x) is tuple:
        return {"tuple": [_encoded(part) for part in x]}
    if isinstance(x, np.generic):
        return _encoded(x.item())
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if callable(x) and is_library_function(x):
        return {"global": [x.__module__, x.__qualname__]}
    fields: Any = getattr(x, "_fields", None)  # a NamedTuple's
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [f.name for f in dataclasses.fields(x)]
    if fields is not None and is_library_function(type(x)):
        values = [_encoded(getattr(x, name)) for name in fields]
        return {"made": [type(x).__module__, type(x).__qualname__, values]}
    raise _NotData(getattr(x, "__qualname__", repr(x)))


def _decoded(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, data),) = x.items()
    if kind == "tuple":
        return tuple(_decoded(part) for part in data)
    if kind == "dtype":
        return np.dtype(data)
    module, name, *values = data
    if not is_library_module(module):
        raise ValueError(f"{module}.{name} is not a part of JAX, Flax or attention_jax")
    found = getattr(importlib.import_module(module), name)
    if kind == "global":
        return found
    if not (isinstance(found, type) and module.startswith("attention_jax.")):
        raise ValueError(f"{module}.{name} is not a class of attention_jax")
    return found(*map(_decoded, *values))
