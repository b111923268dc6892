"""A bias given as an array: bias(t, s) = array[..., t, s]."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import check_pairs
from attention_jax._core.numerics import NEG_INF, infs_are_errors, stats_dtype
from attention_jax._core.pytrees import pytree
from attention_jax._core.term import Sides, Term


@pytree
class ArrayBias(Term):
    """A bias given as an array, `[*#B, #N, #T, #S]` by NumPy's broadcasting rule."""

    array: Any

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "array_bias", {"array": self.array}

    def check(self, layout: Layout) -> None:
        """The array must be floating and broadcast to `[*B, N, T, S]`."""
        if not jnp.issubdtype(self.array.dtype, jnp.floating):
            raise TypeError(
                f"bias must be floating, got dtype {np.dtype(self.array.dtype).name}; a boolean "
                "array is a mask: pass it as mask="
            )
        check_pairs("bias", self.array, layout)

    def prepare(self, query: Array, key: Array) -> Sides:
        """The array, by pair; under `jax_debug_infs` its finite entries, and which are -inf.

        An array with -inf among the residuals of a gradient would be reported as a fault.
        """
        array = jnp.atleast_2d(self.array)
        if not infs_are_errors():
            return Sides(pair=array)
        masked = array == NEG_INF
        return Sides(pair=(jnp.where(masked, 0, array), masked))

    def per_head(self) -> "ArrayBias":
        """No parameters: a block needs only the pair data."""
        return ArrayBias(None)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The slice that belongs to the block."""
        pair = sides.pair
        if isinstance(pair, tuple):
            finite, masked = pair
            pair = jnp.where(masked, NEG_INF, finite)
        shape = (query_positions.shape[0], key_positions.shape[0])
        return jnp.broadcast_to(pair, shape).astype(stats_dtype(pair.dtype))

    @property
    def may_hide(self) -> bool:
        """An entry of -inf masks its pair."""
        return True

    @property
    def may_overflow(self) -> bool:
        """Its derivative is 1."""
        return False


def array_bias(array: object) -> ArrayBias:
    """A bias from a floating array, broadcastable to `[*B, N, T, S]`; `bias=array` does the same.

    Args:
        array: floating; it is indexed by array index, and -inf masks a pair.

    Returns:
        A bias object; the array is its parameter.
    """
    return ArrayBias(array)
