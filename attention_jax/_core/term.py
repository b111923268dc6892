"""Terms of the logits: the protocol of scores and biases.

    logits(t, s) = Σ_terms term(q_t, k_s, t, s)

A term is evaluated in two halves. `prepare` runs once over whole arrays, O(T + S): projections,
normalisation, scale. `block` runs once for each block of one head, on slices. Ordinary autodiff
differentiates `prepare`; a kernel's backward pass takes `jax.jvp` of `block`, so no term needs a
gradient of its own.
"""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.pytrees import Record


class Sides(NamedTuple):
    """Data of an attention problem, by the axes it runs along; each field is any pytree.

    Attributes:
        query: leaves `[*#B, #N, T, ...]`; inside a block `[Tb, ...]`.
        key: leaves `[*#B, #N, S, ...]` (or K heads); inside a block `[Sb, ...]`.
        pair: leaves `[*#B, #N, #T, #S]`; inside a block `[#Tb, #Sb]`.
    """

    query: Any = ()
    key: Any = ()
    pair: Any = ()


class DotProduct(NamedTuple):
    """A term that is a constant times the dot product: `scale · q · k`, at most `cap` by a tanh."""

    scale: float
    cap: float | None = None


class Term(Record):
    """A summand of the logits. Subclasses are frozen dataclasses registered as pytrees."""

    is_product: ClassVar[bool] = False
    """Whether a block is one matrix product of prepared queries and keys, scaled or not."""

    def check(self, layout: Layout) -> None:
        """Raises a ValueError when the parameters do not fit the sizes of the problem."""

    def prepare(self, query: Array, key: Array) -> Sides:
        """Data for the blocks, from `query [*B, N, T, H]` and `key [*B, K, S, Hk]`."""
        raise NotImplementedError(f"{type(self).__name__} has no prepare")

    def per_head(self) -> "Term":
        """The parameters that `block` reads, each leaf with one leading axis of size N or 1."""
        return self

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """This term for one block of one head, `[Tb, Sb]`, float32 at least."""
        raise NotImplementedError(f"{type(self).__name__} has no block")

    def dot_product(self, depth: int) -> DotProduct | None:
        """The term as a dot product of vectors of this depth, if it is one."""
        return None

    def scale_of_products(self, depth: int) -> float | None:
        """The constant by which the term multiplies dot products, if there is one."""
        product = self.dot_product(depth)
        return None if product is None else product.scale

    @property
    def may_hide(self) -> bool:
        """Whether the term can be -inf for finite input, which makes the pair invisible."""
        return False

    @property
    def may_overflow(self) -> bool:
        """Whether finite data can have a derivative that is not finite.

        A masked pair's cotangent is 0, and 0 times such a derivative is NaN: rows and columns
        without a visible pair are replaced before `block` is called.
        """
        return True

    @property
    def block_hint(self) -> tuple[int, int] | None:
        """The fastest (query, key) block size on a CPU; None if the term does not matter."""
        return None


def without_masked(sides: Sides, visible: Array) -> Sides:
    """A block's data `[Tb, ...]` and `[Sb, ...]`, with ones in rows and columns that are masked.

    `visible` is bool, `[#Tb, #Sb]`; pair data is not changed.
    """

    def keep(x: Any, axis: int) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        some = jnp.any(visible, axis=axis).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(some, x, jnp.ones((), x.dtype))

    return Sides(
        jax.tree.map(lambda x: keep(x, 1), sides.query),
        jax.tree.map(lambda x: keep(x, 0), sides.key),
        sides.pair,
    )


def head_axis(parameter: Any, rank: int) -> Any:
    """Adds a leading head axis to `parameter` if it has none; `rank` is its rank without it."""
    return parameter if np.ndim(parameter) > rank else jnp.asarray(parameter)[None]


def over_heads(parameter: Any, rank: int, ndim: int) -> Array:
    """`[own]` or `[N, own]`, to broadcast against an array `[*B, N, length, own]` of `ndim` axes.

    `rank` is the number of own axes; the shapes are written out so that no axis is added silently.
    """
    parameter = jnp.asarray(parameter)
    own = parameter.shape[parameter.ndim - rank :]
    heads = parameter.shape[: parameter.ndim - rank]
    if not heads:
        return parameter
    lead = (1,) * (ndim - 1 - len(heads) - max(rank, 1))
    return parameter.reshape(*lead, *heads, *(() if rank > 1 else (1,)), *(own or (1,)))
