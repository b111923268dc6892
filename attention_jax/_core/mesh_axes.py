"""Mesh axes that are part of a value's type: manual ones and explicit ones.

Manual: inside `jax.shard_map` a value varies over some of them, or is replicated. A loop's carry
and a branch's outputs must vary over the same axes. The cotangent of a cast to varying is a sum
over devices; inside a loop, devices that take different branches would deadlock in it. So
everything is cast once, outside the loops.

Explicit: arrays that are mapped together need equal sharding along the mapped axis. Arrays made
here, such as dropout's bits, or passed whole, such as a mask, do not, and are resharded first.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def _axes(tree: Any) -> frozenset[Any]:
    types = (jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree))
    return frozenset().union(*(t.varying for t in types))


def vary_as(tree: Any, like: Any) -> Any:
    """`tree`, each leaf varying over all the axes that some leaf of `like` varies over."""
    axes = _axes(like)

    def vary(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x  # a constant, known while tracing
        missing = tuple(sorted(axes - _axes(x), key=str))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def is_explicit() -> bool:
    """Whether the current mesh has explicit axes."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return any(t == jax.sharding.AxisType.Explicit for t in types or ())


def divide(x: Any, mesh: Any, wanted: dict[int, Any]) -> Any:
    """`x` with some of its axes sharded over mesh axes, over which its other axes are not."""
    spec = list(jax.typeof(x).sharding.spec)
    if all(spec[axis] == entry for axis, entry in wanted.items()):
        return x
    taken = {name for entry in wanted.values() for name in _names(entry)}
    spec = [None if taken & set(_names(entry)) else entry for entry in spec]
    for axis, entry in wanted.items():
        spec[axis] = entry
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def _names(entry: Any) -> tuple[Any, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def whole_behind(x: Any, lead: int) -> Any:
    """`x` with only its first `lead` axes sharded over explicit mesh axes; others are gathered."""
    sharding = jax.typeof(x).sharding
    split = [axis for axis in range(lead, x.ndim) if sharding.spec[axis] is not None]
    return divide(x, sharding.mesh, dict.fromkeys(split)) if split else x


def vmap_divided(function: Callable[[list[Any]], Any], leaves: list[Any], size: Any) -> Any:
    """`jax.vmap(function)(leaves)`; all leading axes are sharded as in the first sharded leaf.

    The explicit mesh of that leaf becomes the current one: JAX does not infer it for the initial
    state of a loop inside.
    """
    shardings = [jax.typeof(x).sharding for x in leaves]
    divided = next((s for s in shardings if s.spec and s.spec[0] is not None), None)
    if divided is None:
        return jax.vmap(function, axis_size=size)(leaves)
    with jax.sharding.use_abstract_mesh(divided.mesh):
        return jax.vmap(function)([divide(x, divided.mesh, {0: divided.spec[0]}) for x in leaves])


def divide_factors(x: Any, y: Any) -> tuple[Any, Any]:
    """Two factors of a matrix product, with equal sharding of the axes before the last two."""
    kinds = jax.typeof(x), jax.typeof(y)
    wanted: tuple[dict[int, Any], ...] = {}, {}
    mesh = None
    for axis in range(3, min(x.ndim, y.ndim) + 1):
        entries = [kind.sharding.spec[-axis] for kind in kinds]
        if entries[0] != entries[1] and None in entries and x.shape[-axis] == y.shape[-axis]:
            at = entries.index(None)
            wanted[at][kinds[at].ndim - axis] = entries[1 - at]
            mesh = kinds[1 - at].sharding.mesh
    if mesh is None:
        return x, y
    return tuple(
        divide(z, mesh, want) if want else z for z, want in zip((x, y), wanted, strict=True)
    )
