"""One answer for a whole vmapped batch, so that a branch on it stays a branch.

`jax.vmap` turns a branch whose predicate differs between entries into a selection, and guards every
operand with `stop_gradient`. On a tangent that cannot be transposed, so reverse mode fails; and a
selection computes all branches anyway. Joining the answers first avoids both.
"""

from collections.abc import Callable
from typing import Any

import jax


def one_for_all(join: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The identity, which under `jax.vmap` returns the same for all entries.

    Args:
        join: one answer for several, stacked along axis 0; for integers and booleans.
    """

    @jax.custom_batching.custom_vmap
    def same(x: Any) -> Any:
        return x

    @same.def_vmap
    def _(axis_size: int, in_batched: Any, x: Any) -> Any:
        return same(join(x) if in_batched[0] else x), False

    return same
