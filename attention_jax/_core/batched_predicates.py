"""One predicate for a whole vmapped batch, so that `lax.cond` remains a branch under vmap.

`jax.vmap` turns a branch whose predicate differs between entries into a select of all branches, and
applies `stop_gradient` to every operand, which cannot be transposed for a tangent, so reverse mode
fails. Joining the predicates first avoids both.
"""

from collections.abc import Callable
from typing import Any

import jax


def one_for_all(join: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The identity, which under `jax.vmap` returns one value for all entries.

    Args:
        join: maps integers or booleans, stacked along axis 0, to one of them.
    """

    @jax.custom_batching.custom_vmap
    def same(x: Any) -> Any:
        return x

    @same.def_vmap
    def _(axis_size: int, in_batched: Any, x: Any) -> Any:
        return same(join(x) if in_batched[0] else x), False

    return same
