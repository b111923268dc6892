"""Multiplicative scores: dot, scaled dot, general, cosine; and scores given as a function.

References:
    Luong, Pham, Manning 2015, "Effective Approaches to Attention-based Neural Machine
    Translation", arXiv:1508.04025, §3.1 (dot, general, concat).
    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, eq. 1 (scaled dot).
    Graves, Wayne, Danihelka 2014, "Neural Turing Machines", arXiv:1410.5401, eq. 6 (cosine).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, Layout, Query
from attention_jax._core.checks import check_parameter, check_per_head
from attention_jax._core.numerics import (
    is_low_precision,
    matmul,
    safe_normalize,
    stats_dtype,
)
from attention_jax._core.products import pair_products
from attention_jax._core.pytrees import Bound, pytree, static
from attention_jax._core.term import DotProduct, Sides, head_axis, over_heads
from attention_jax.scores.score import Score

BlockFunction = Callable[[Array, Array, Array, Array], Array]


def _same_depth(layout: Layout) -> None:
    if layout.H != layout.Hk:
        raise ValueError(f"query depth {layout.H} and key depth {layout.Hk} must match (H)")


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Product(Score):
    """A score whose block is one matrix product of prepared queries and keys.

    Parameters are applied by `prepare`.
    """

    is_product = True

    def per_head(self) -> "Product":
        """Without parameters."""
        return dataclasses.replace(self, **{f.name: None for f in dataclasses.fields(self)})

    @property
    def may_overflow(self) -> bool:
        """Linear in both factors."""
        return False

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """`q kᵀ`."""
        return pair_products(sides.query, sides.key)


@pytree
class Dot(Product):
    """`e = q · k`."""

    def check(self, layout: Layout) -> None:
        """Depths must agree."""
        _same_depth(layout)

    def prepare(self, query: Array, key: Array) -> Sides:
        """The arrays as they are."""
        return Sides(query, key)

    def dot_product(self, depth: int) -> DotProduct:
        """With scale 1."""
        return DotProduct(1.0)


@pytree
class ScaledDot(Product):
    """`e = scale · q · k`, scale 1/√H unless given."""

    scale: Any = None
    constant: float | None = static(default=None)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "scaled_dot", {"scale": self.constant if self.scale is None else self.scale}

    def check(self, layout: Layout) -> None:
        """Depths must agree; a learned scale is a scalar or one for each head."""
        _same_depth(layout)
        if self.scale is not None:
            check_per_head("scale", self.scale, "", layout)

    def dot_product(self, depth: int) -> DotProduct | None:
        """Unless the scale is an array."""
        scale = self.static_scale(depth)
        return None if scale is None else DotProduct(float(scale))

    def static_scale(self, depth: int) -> float | None:
        """The factor as a Python number, or None if it is an array."""
        if self.scale is not None:
            return None
        return self.constant if self.constant is not None else 1 / np.sqrt(max(depth, 1))

    def _factor(self, depth: int, dtype: Any) -> Array:
        constant = self.static_scale(depth)
        return jnp.asarray(self.scale if constant is None else constant).astype(dtype)

    def prepare(self, query: Array, key: Array) -> Sides:
        """Scales the query, T·H products instead of T·S, if its dtype is precise enough."""
        if is_low_precision(query.dtype):
            return Sides(query, key)
        factor = self._factor(query.shape[-1], query.dtype)
        return Sides(query * over_heads(factor, 0, query.ndim), key)

    def per_head(self) -> "ScaledDot":
        """The scale with its head axis."""
        if self.scale is None:
            return self
        return ScaledDot(head_axis(self.scale, 0), self.constant)

    @property
    def may_overflow(self) -> bool:
        """A learned scale's derivative is the product itself."""
        return self.scale is not None

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """`q kᵀ`, scaled afterwards and in float32 for low-precision inputs."""
        scores = pair_products(sides.query, sides.key)
        if is_low_precision(sides.query.dtype):
            scores = scores * self._factor(sides.query.shape[-1], scores.dtype)
        return scores


@pytree
class General(Product):
    """`e = qᵀ W k`."""

    weight: Any

    def check(self, layout: Layout) -> None:
        """The weight must be `[H, Hk]` or `[N, H, Hk]`."""
        check_per_head("weight", self.weight, "H, Hk", layout, layout.H, layout.Hk)

    def prepare(self, query: Array, key: Array) -> Sides:
        """Projects the query: `q W`."""
        return Sides(matmul(query, over_heads(self.weight, 2, query.ndim)), key)


@pytree
class Cosine(Product):
    """`e = scale · (q / |q|) · (k / |k|)`; a zero vector scores 0."""

    scale: Any = 1.0

    def check(self, layout: Layout) -> None:
        """Depths must agree; the scale is a scalar or one for each head."""
        _same_depth(layout)
        check_per_head("scale", self.scale, "", layout)

    def prepare(self, query: Array, key: Array) -> Sides:
        """Normalises both, and scales the query."""
        query, key = safe_normalize(query), safe_normalize(key)
        factor = jnp.asarray(self.scale).astype(query.dtype)
        return Sides(query * over_heads(factor, 0, query.ndim), key)


@pytree
class Custom(Score):
    """`e = f(query_block, key_block, query_positions, key_positions)`."""

    function: Bound

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "custom", {"f": self.function.function}

    def prepare(self, query: Array, key: Array) -> Sides:
        """The arrays as they are."""
        return Sides(query, key)

    def per_head(self) -> "Custom":
        """The function's parameters are shared by all heads."""
        return Custom(jax.tree.map(lambda x: jnp.asarray(x)[None], self.function))

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """Calls the function and checks what it returns."""
        scores = self.function(sides.query, sides.key, query_positions, key_positions)
        wanted = (query_positions.shape[0], key_positions.shape[0])
        if not hasattr(scores, "dtype") or not jnp.issubdtype(scores.dtype, jnp.floating):
            raise TypeError("scores.custom(f): f must return a floating array [Tb, Sb]")
        if tuple(scores.shape) != wanted:
            raise ValueError(
                f"scores.custom(f): f returned shape {list(scores.shape)} for a block "
                f"[Tb, Sb] = {list(wanted)}"
            )
        return scores.astype(stats_dtype(scores.dtype))

    @property
    def may_hide(self) -> bool:
        """The function may return -inf."""
        return True


def dot() -> Score:
    """The dot product, `e = q · k`.

    Grows with the depth: for unit-variance inputs its variance is H. See `scaled_dot`.

    Returns:
        A score object.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "dot".
    """
    return Dot()


def scaled_dot(scale: Any = None) -> Score:
    """The scaled dot product, `e = scale · q · k`.

    Args:
        scale: a number, a scalar array or one entry for each query head `[N]`; None is 1/√H.
            Arrays get gradients.

    Returns:
        A score object.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
    """
    if scale is None or (isinstance(scale, (int, float)) and not isinstance(scale, bool)):
        return ScaledDot(constant=None if scale is None else float(scale))
    check_parameter("scale", scale)
    return ScaledDot(scale)


def general(weight: Any) -> Score:
    """The bilinear score, `e = qᵀ W k`.

    Args:
        weight: `[H, Hk]`, shared by all heads, or `[N, H, Hk]`. The query's depth H and the key's
            Hk may differ.

    Returns:
        A score object; `weight` is its parameter.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "general".
    """
    check_parameter("weight", weight)
    return General(weight)


def cosine(scale: Any = 1.0) -> Score:
    """The cosine similarity, `e = scale · q · k / (|q| |k|)`, 0 for a zero vector.

    Args:
        scale: the inverse temperature (β in the paper): a number, a scalar array or `[N]`.

    Returns:
        A score object; an array `scale` is its parameter.

    References:
        Graves et al. 2014, arXiv:1410.5401, eq. 5-6.
    """
    check_parameter("scale", scale)
    return Cosine(scale)


def custom(f: BlockFunction) -> Score:
    """A custom score, written for one block of one head.

    Args:
        f: `f(query_block [Tb, H], key_block [Sb, Hk], query_positions [Tb], key_positions [Sb])
            -> [Tb, Sb]`. A `jax.tree_util.Partial` carries parameters that get gradients. A score
            of -inf makes the pair invisible.

    Returns:
        A score object.
    """
    if not callable(f):
        raise TypeError(f"scores.custom(f): f must be callable, got {type(f).__name__}")
    return Custom(Bound.of(f))


def dot_score(query: Query, key: Key) -> Float[Array, "*B N T S"]:
    """`e = q · k` for all pairs; see `dot`."""
    return dot()(query, key)


def scaled_dot_score(query: Query, key: Key, scale: Any = None) -> Float[Array, "*B N T S"]:
    """`e = scale · q · k` for all pairs, scale 1/√H by default; see `scaled_dot`."""
    return scaled_dot(scale)(query, key)


def general_score(
    query: Query,
    key: Key,
    weight: Any,
) -> Float[Array, "*B N T S"]:
    """`e = qᵀ W k` for all pairs; see `general`."""
    return general(weight)(query, key)


def cosine_score(query: Query, key: Key, scale: Any = 1.0) -> Float[Array, "*B N T S"]:
    """`e = scale · cos(q, k)` for all pairs; see `cosine`."""
    return cosine(scale)(query, key)
