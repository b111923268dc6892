"""Parameters from one flavour to the other: the same numbers under the same names."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from flax.core import meta

Module = TypeVar("Module", bound=nnx.Module)
Path = tuple[Any, ...]


def from_nnx(module: nnx.Module) -> dict[str, Any]:
    """The variables of the Linen module that was made with the same arguments.

    An NNX list `layers` of modules is `layers_0`, `layers_1`, … in Linen; all other names agree.
    Flax's own attention modules have these names too.

    Args:
        module: An NNX module; it stays as it is.

    Returns:
        `{"params": ...}`, for `apply`.

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
    flat = {_linen_path(path): value for path, value in _parameters(module).items()}
    return {"params": traverse_util.unflatten_dict(flat)}


def to_nnx(variables: Mapping[str, Any], module: Module) -> Module:
    """An NNX module with the parameters of the Linen module that was made with the same arguments.

    Args:
        variables: `{"params": ...}` of the Linen module.
        module: An NNX module made with the same arguments; it stays as it is.

    Returns:
        A copy of `module` with these parameters.

    Raises:
        ValueError: If names or shapes do not agree; the message lists them.
    """
    flat: dict[Path, Any] = traverse_util.flatten_dict(meta.unbox(variables["params"]))
    present = _parameters(module)
    wanted = {_linen_path(path): path for path in present}
    if unknown := sorted("/".join(map(str, p)) for p in set(flat) ^ set(wanted)):
        raise ValueError(f"parameters of one side only: {', '.join(unknown)}")
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    new = {}
    for linen_path, path in wanted.items():
        old, value = present[path], flat[linen_path]
        if np.shape(old) != np.shape(value):
            raise ValueError(
                f"{'/'.join(linen_path)} has shape {list(np.shape(value))} but the module's is "
                f"{list(np.shape(old))}"
            )
        new[path] = jnp.asarray(value)
    nnx.replace_by_pure_dict(parameters, traverse_util.unflatten_dict(new))
    return nnx.merge(graph, parameters, rest)


def _parameters(module: nnx.Module) -> dict[Path, Any]:
    """The arrays of the parameters, by path."""
    return traverse_util.flatten_dict(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def _linen_path(path: Path) -> tuple[str, ...]:
    """Linen names a module in a list by the list's name and its place."""
    names: list[str] = []
    for part in path:
        if isinstance(part, int):
            names[-1] = f"{names[-1]}_{part}"
        else:
            names.append(str(part))
    return tuple(names)
