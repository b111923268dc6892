"""The base class of bias objects, which are added to scores.

    logits(t, s) = score(q_t, k_s) + bias(t, s)

A bias is a term of the logits like a score, evaluated block by block from positions, without a
[T, S] array. A new bias is one class with `block` (see
`attention_jax._core.term`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import AnyArray, Array
from attention_jax._core.checks import check_count, check_positions
from attention_jax._core.term import Sides, Term


class Bias(Term):
    """A bias object: added to a score by `score + bias` or given as `bias=`."""

    def prepare(self, query: Array, key: Array) -> Sides:
        """No data: the bias depends only on positions."""
        return Sides()

    @property
    def may_overflow(self) -> bool:
        """Linear in its parameters."""
        return False

    def to_array(
        self,
        T: int,
        S: int,
        *,
        query_positions: AnyArray | None = None,
        key_positions: AnyArray | None = None,
    ) -> Array:
        """The bias as an array, which `attend` never builds.

        Args:
            T: number of queries.
            S: number of keys.
            query_positions: ints `[T]` or `[*B, T]`; 0..T-1 by default.
            key_positions: ints `[S]` or `[*B, S]`; 0..S-1 by default.

        Returns:
            `[N, T, S]`, or `[*B, N, T, S]` for positions with batch axes; float32 at least.

        Raises:
            TypeError: the bias depends on the query: there is no such array.
        """
        query, key = (
            _positions(name, given, check_count(letter, size))
            for name, letter, given, size in (
                ("query_positions", "T", query_positions, T),
                ("key_positions", "S", key_positions, S),
            )
        )
        batch = jnp.broadcast_shapes(query.shape[:-1], key.shape[:-1])

        def plane(query: Array, key: Array) -> Array:
            return jax.vmap(lambda one: one.block(Sides(), query, key))(self.per_head())

        for _ in batch:
            plane = jax.vmap(plane)
        return plane(*(jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in (query, key)))


class ContentBias(Bias):
    """A bias that depends on the query or the key, and not only on positions."""

    def to_array(
        self,
        T: int,
        S: int,
        *,
        query_positions: AnyArray | None = None,
        key_positions: AnyArray | None = None,
    ) -> Array:
        """Raises a TypeError: the bias depends on the query."""
        raise TypeError(
            f"{self!r} depends on the query and has no array; "
            "(scores.dot() + bias)(query, key) evaluates it for all pairs"
        )


def _positions(name: str, positions: Any, length: int) -> Array:
    if positions is None:
        return jnp.arange(length, dtype=jnp.int32)
    check_positions(name, positions, np.shape(positions)[:-1], length)
    return jnp.asarray(positions).astype(jnp.int32)
