"""The letters of axes.

| letter | axis                                     | letter | axis                                |
|--------|------------------------------------------|--------|-------------------------------------|
| `*B`   | batch, any number of leading axes or none| `H`    | depth of one query/key head         |
| `T`    | query length                             | `V`    | depth of one value head             |
| `S`    | key/value length                         | `A`    | hidden width of an additive score   |
| `N`    | query heads                              | `D`    | model width                         |
| `K`    | key/value heads, N a multiple of K       |        |                                     |

Public arrays are `query [*B, T, N, H]`, `key [*B, S, K, H]`, `value [*B, S, K, V]`. Inside the
engine the head axis is in front of the length axis (`[*B, N, T, H]`), so that a kernel written
for one head can be mapped over everything to its left.
"""

from typing import Annotated, Any, NamedTuple

import jax.export
import numpy as np
from jaxtyping import Array, Bool, Float, Int

AnyArray = Array | np.ndarray
Shape = tuple[Any, ...]  # ints, or symbolic sizes under `jax.export`
Size = Annotated[Any, int]  # an int or a symbolic size
Batch = Annotated[Any, int | Shape]  # `*B` as one size or a tuple

# The shapes of public arguments. The annotations only document them: `checks` raises the errors, so
# no annotation may refuse an argument before.
Query = Annotated[Any, Float[Array, "*B T N H"]]
Key = Annotated[Any, Float[Array, "*B S K Hk"]]
Value = Annotated[Any, Float[Array, "*B S K V"]]
MaskLike = Annotated[Any, Bool[Array, "*#B #N #T #S"]]
BiasLike = Annotated[Any, Float[Array, "*#B #N #T #S"]]
QueryPositions = Annotated[Any, Int[Array, "*#B T"]]
KeyPositions = Annotated[Any, Int[Array, "*#B S"]]


class Layout(NamedTuple):
    """The sizes of one attention problem, by letter."""

    batch: Shape
    T: int
    S: int
    N: int
    K: int
    H: int
    Hk: int
    V: int

    @property
    def symbolic_lengths(self) -> str:
        """The lengths that are symbolic under `jax.export`, such as "T = t"; "" without any."""
        lengths = {"T": self.T, "S": self.S}
        symbolic = (f"{x} = {n}" for x, n in lengths.items() if jax.export.is_symbolic_dim(n))
        return ", ".join(symbolic)

    @property
    def group(self) -> int:
        """Query heads that share one key/value head, N // K."""
        return self.N // self.K
