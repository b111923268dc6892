"""Manual mesh axes: inside `jax.shard_map` a value varies over some of them, or is the same.

A loop's carry and a branch's outputs must vary alike. And what is cast to varying inside a loop has
its cotangent summed over devices inside the loop, where devices that take different branches wait
for one another for ever. So everything is cast once, outside: the transpose is one sum.
"""

from typing import Any

import jax
import numpy as np


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
