"""Conversion of parameters between Linen and NNX."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from flax.core import meta

Module = TypeVar("Module", bound=nnx.Module)
Path = tuple[Any, ...]


def from_nnx(module: nnx.Module) -> dict[str, Any]:
    """The variables of the Linen module with the same arguments.

    An NNX list `layers` of modules is `layers_0`, `layers_1`, … in Linen; all other names agree.
    Flax's attention modules have these names too.

    Args:
        module: An NNX module; it is not changed.

    Returns:
        `{"params": ...}`, for `apply`; with `"adapted"` if a score has states, and `"hash"` if a
        layer hashes.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax import linen
        >>> from attention_jax.nnx import MultiHeadAttention
        >>> trained = MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
        >>> variables = linen.from_nnx(trained)
        >>> x = jnp.ones((3, 8))
        >>> bool(jnp.allclose(linen.MultiHeadAttention(2).apply(variables, x), trained(x)))
        True
    """
    found = {}
    for collection, kind in _COLLECTIONS.items():
        flat = {_linen_path(path): value for path, value in _read(module, kind).items()}
        if flat or collection == "params":
            found[collection] = traverse_util.unflatten_dict(flat)
    return found


def to_nnx(variables: Mapping[str, Any], module: Module) -> Module:
    """An NNX module with the parameters of the Linen module with the same arguments.

    Args:
        variables: The variables of the Linen module; only its collections "params", "adapted" and
            "hash" are used.
        module: An NNX module with the same arguments; it is not changed.

    Returns:
        A copy of `module` with these parameters.

    Raises:
        ValueError: If names or shapes do not agree; the message lists them.
    """
    state = nnx.state(module)
    for collection, kind in _COLLECTIONS.items():
        present = _read(module, kind)
        new = _matched(meta.unbox(variables.get(collection, {})), present)
        part = nnx.state(module, kind)
        nnx.replace_by_pure_dict(part, traverse_util.unflatten_dict(new))
        state = nnx.merge_state(state, part)
    return nnx.merge(nnx.graphdef(module), state)


def _matched(found: Any, present: dict[Path, Any]) -> dict[Path, Any]:
    """Linen's values by NNX path."""
    flat: dict[Path, Any] = traverse_util.flatten_dict(found)
    wanted = {_linen_path(path): path for path in present}
    if unknown := sorted("/".join(map(str, p)) for p in set(flat) ^ set(wanted)):
        raise ValueError(f"variables of one side only: {', '.join(unknown)}")
    new = {}
    for linen_path, path in wanted.items():
        old, value = present[path], flat[linen_path]
        if np.shape(old) != np.shape(value):
            raise ValueError(
                f"{'/'.join(linen_path)} has shape {list(np.shape(value))} but the module's is "
                f"{list(np.shape(old))}"
            )
        new[path] = jnp.asarray(value)
    return new


def _called(name: str) -> Any:
    """Whether a variable is of the class of that name, without importing the class."""

    def is_one(path: Path, value: Any) -> bool:
        del path
        return getattr(value, "type", type(value)).__name__ == name

    return is_one


# Linen's collections: parameters, states that training calls update, and random constants.
_COLLECTIONS: dict[str, Any] = {
    "params": nnx.Param,
    "adapted": _called("Adapted"),
    "hash": _called("Hash"),
}


def _read(module: nnx.Module, kind: Any) -> dict[Path, Any]:
    """The arrays of that kind, by path."""
    return traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(module, kind)))


def _linen_path(path: Path) -> tuple[str, ...]:
    """Linen names a module in a list by the list's name and its index."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int):
            names[-1] = f"{names[-1]}_{part}"
        else:
            names.append(str(part))
    return tuple(names)
