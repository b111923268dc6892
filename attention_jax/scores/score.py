"""The base class of scores, the similarity of queries and keys.

    e(t, s) = score(q_t, k_s)

A score is a frozen pytree. Its array parameters are leaves and get gradients; the rest is static.
A new score is one class with `prepare` and `block` (see `attention_jax._core.term`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array, Key, Layout, Query
from attention_jax._core.checks import check_inputs
from attention_jax._core.leading_axes import head_axes, map_leading
from attention_jax._core.numerics import NEG_INF
from attention_jax._core.pytrees import pytree
from attention_jax._core.term import Sides, Term, without_masked
from attention_jax.positions.array_bias import ArrayBias


class Score(Term):
    """A similarity of queries and keys, evaluated block by block. `score + bias` adds a bias."""

    def __add__(self, other: object) -> "Score":
        """The score plus a bias object, another score, or a bias array."""
        if isinstance(other, (np.ndarray, jax.Array)):
            other = ArrayBias(other)
        if not isinstance(other, Term):
            return NotImplemented
        return Sum(self, other)

    def __call__(self, query: Query, key: Key) -> Float[Array, "*B N T S"]:
        """Scores of all pairs, at positions 0..T-1 and 0..S-1, in float32 at least."""
        layout = check_inputs(query, key)
        self.check(layout)
        sides = self.prepare(jnp.swapaxes(query, -2, -3), jnp.swapaxes(key, -2, -3))
        canonical = head_axes((self.per_head(), sides), layout)
        query_positions, key_positions = (
            jnp.arange(size, dtype=jnp.int32) for size in (layout.T, layout.S)
        )

        def one(parts: tuple[Score, Sides]) -> Array:
            score, sides = parts
            return score.block(sides, query_positions, key_positions)

        sizes = (*layout.batch, layout.K, layout.group)
        scores = map_leading(one, canonical, sizes)
        return scores.reshape(*layout.batch, layout.N, layout.T, layout.S)


@pytree
class Sum(Score):
    """`score + bias`: the sum of two terms."""

    score: Term
    bias: Term

    def __repr__(self) -> str:
        """The expression."""
        return f"{self.score!r} + {self.bias!r}"

    def check(self, layout: Layout) -> None:
        """Both terms must fit."""
        self.score.check(layout)
        self.bias.check(layout)

    def scale_of_products(self, depth: int) -> float | None:
        """The score's."""
        return self.score.scale_of_products(depth)

    def prepare(self, query: Array, key: Array) -> Sides:
        """The two terms' data, side by side."""
        pairs = zip(self.score.prepare(query, key), self.bias.prepare(query, key), strict=True)
        return Sides(*pairs)

    def per_head(self) -> "Sum":
        """Both terms for one head."""
        return Sum(self.score.per_head(), self.bias.per_head())

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The sum of the two blocks; -inf where the second is -inf, for any first."""
        first, second = (Sides(*side) for side in zip(*sides, strict=True))
        bias = self.bias.block(second, query_positions, key_positions)
        hidden = bias == NEG_INF if self.bias.may_hide else None
        if hidden is not None and self.score.may_overflow:
            first = without_masked(first, ~hidden)
        score = self.score.block(first, query_positions, key_positions)
        dtype = jnp.promote_types(score.dtype, bias.dtype)
        total = score.astype(dtype) + bias.astype(dtype)
        return total if hidden is None else jnp.where(hidden, NEG_INF, total)

    @property
    def may_hide(self) -> bool:
        """Whether either term may be -inf."""
        return self.score.may_hide or self.bias.may_hide

    @property
    def may_overflow(self) -> bool:
        """Whether a derivative of either term may be other than finite."""
        return self.score.may_overflow or self.bias.may_overflow

    @property
    def block_hint(self) -> tuple[int, int] | None:
        """The first term's, else the second's."""
        return self.score.block_hint or self.bias.block_hint
