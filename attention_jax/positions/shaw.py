"""Shaw et al.'s relative position bias: one learned key per clipped distance."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import as_array, check_floating, check_per_head
from attention_jax._core.numerics import matmul
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides, over_heads
from attention_jax.positions.bias import Bias, ContentBias
from attention_jax.positions.distance import by_distance

Table = Annotated[Any, Float[Array, "*N rows H"]]


@pytree
class Shaw(ContentBias):
    """`q · table[k + clip(distance, -k, k)] / √H`; `reach` is k."""

    table: Any
    reach: int = static()

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "shaw", {"table": self.table}

    def check(self, layout: Layout) -> None:
        """Checks that rows have the query's depth H."""
        check_per_head("table", self.table, "2k + 1, H", layout, 2 * self.reach + 1, layout.H)

    def prepare(self, query: Array, key: Array) -> Sides:
        """Products of all queries with all rows, `[*B, N, T, 2k + 1]`: O(T · k)."""
        table = over_heads(self.table, 2, query.ndim)
        products = matmul(query, jnp.swapaxes(table, -1, -2))
        return Sides(query=products / np.sqrt(max(query.shape[-1], 1)).astype(products.dtype))

    def per_head(self) -> "Shaw":
        """Without the table, which only `prepare` uses."""
        return Shaw(None, self.reach)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The query's product with the row of the clipped distance, for every pair in the block."""
        k = self.reach
        return by_distance(
            sides.query,
            query_positions,
            key_positions,
            lambda distance: k + distance.clip(-k, k),
            (-k, k),
        )


def shaw(table: Table) -> Bias:
    """Shaw et al.'s relative keys, `q_t · table[k + clip(position_s - position_t, -k, k)] / √H`.

    The paper's e_ts = q_t · (k_s + a_ts) / √H is `scaled_dot() + shaw(table)`. The bias depends on
    the query, so it has no `to_array`; for the paper's relative values see
    `attention_jax.shaw_attention`.

    Args:
        table: `[2k + 1, H]`, shared by all heads as in the paper, or `[N, 2k + 1, H]`;
            differentiable. Row k is distance 0.

    Returns:
        A bias object.

    Raises:
        ValueError: an even number of rows.

    Example:
        >>> from attention_jax.scores import dot
        >>> query, key = jnp.ones((1, 1, 1)), jnp.zeros((4, 1, 1))
        >>> (dot() + shaw(jnp.array([[1.0], [2.0], [3.0]])))(query, key).tolist()
        [[[2.0, 3.0, 3.0, 3.0]]]

    References:
        Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, eq. 4 and 5.
    """
    return Shaw(table, check_odd_table(table))


def check_odd_table(table: Any) -> int:
    """The k of a table with 2k + 1 rows."""
    as_array("table", table)
    check_floating("table", table)
    if table.ndim not in (2, 3) or table.shape[-2] % 2 == 0:
        raise ValueError(
            f"table must be [2k + 1, H] or [N, 2k + 1, H], an odd number of rows, got "
            f"{list(table.shape)}"
        )
    return table.shape[-2] // 2
