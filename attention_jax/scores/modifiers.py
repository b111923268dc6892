"""Modifiers of scores: temperature, clipping, soft capping, length scaling.

Each wraps a score and changes its value elementwise, so they nest in any order:
`soft_cap(temperature(scaled_dot(), 0.5), 50.0)`.

References:
    Gemma Team 2024, "Gemma 2", arXiv:2408.00118, §2 (logit soft-capping).
    Chiang, Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention",
    arXiv:2202.12172, §5.3 (log-length scaling).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attention_jax._core.axes import Layout
from attention_jax._core.checks import check_number, check_parameter, check_per_head, check_positive
from attention_jax._core.numerics import NEG_INF, is_concrete, stats_dtype
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import DotProduct, Sides, Term, head_axis
from attention_jax.scores.score import Score


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Modified(Score):
    """A score whose blocks are changed elementwise by `change`."""

    score: Term

    def change(self, scores: Array) -> Array:
        """The elementwise change of one block."""
        raise NotImplementedError(f"{type(self).__name__} has no change")

    def check(self, layout: Layout) -> None:
        """The inner score must fit."""
        self.score.check(layout)

    def prepare(self, query: Array, key: Array) -> Sides:
        """As the inner score."""
        return self.score.prepare(query, key)

    def per_head(self) -> "Modified":
        """The inner score for one head."""
        return dataclasses.replace(self, score=self.score.per_head())

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The inner score's block, changed; masked pairs remain -inf."""
        scores = self.score.block(sides, query_positions, key_positions)
        return keep_masked(self.score, scores, self.change)

    @property
    def may_hide(self) -> bool:
        """As the inner score."""
        return self.score.may_hide

    @property
    def block_hint(self) -> tuple[int, int] | None:
        """As the inner score."""
        return self.score.block_hint


def keep_masked(score: Term, scores: Array, change: Callable[[Array], Array]) -> Array:
    """The changed scores, except that -inf stays -inf: it is neither capped nor multiplied by 0."""
    if not score.may_hide:
        return change(scores)
    masked = scores == NEG_INF
    return jnp.where(masked, NEG_INF, change(jnp.where(masked, 0, scores)))


@pytree
class Temperature(Modified):
    """`score / tau`."""

    tau: Any

    def check(self, layout: Layout) -> None:
        """`tau` is a scalar or one for each head."""
        self.score.check(layout)
        check_per_head("tau", self.tau, "", layout)

    def per_head(self) -> "Temperature":
        """`tau` with its head axis."""
        return Temperature(self.score.per_head(), head_axis(self.tau, 0))

    def change(self, scores: Array) -> Array:
        """Divides."""
        return scores / jnp.asarray(self.tau).astype(scores.dtype)


@pytree
class SoftCap(Modified):
    """`cap · tanh(score / cap)`."""

    cap: float | int = static()

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "soft_cap", {"score": self.score, "cap": self.cap}

    def dot_product(self, depth: int) -> DotProduct | None:
        """The inner one, unless that has a cap already."""
        inner = self.score.dot_product(depth)
        if inner is None or inner.cap is not None:
            return None
        return DotProduct(inner.scale, float(self.cap))

    def scale_of_products(self, depth: int) -> float | None:
        """As the inner score, within the cap."""
        return self.score.scale_of_products(depth)

    def change(self, scores: Array) -> Array:
        """Maps into (-cap, cap)."""
        return self.cap * jnp.tanh(scores / self.cap)


@pytree
class Clip(Modified):
    """`min(max(score, low), high)`."""

    low: float | int = static()
    high: float | int = static()

    def scale_of_products(self, depth: int) -> float | None:
        """As the inner score, within the limits."""
        return self.score.scale_of_products(depth)

    def change(self, scores: Array) -> Array:
        """Clips; the gradient is 0 outside."""
        return jnp.clip(scores, self.low, self.high)


@pytree
class LogLength(Modified):
    """`s · ln(n) · score`, n the number of keys unless given."""

    s: Any
    length: Any = None

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "log_length", {"score": self.score, "s": self.s, "length": self.length}

    def check(self, layout: Layout) -> None:
        """`s` is a scalar or one for each head; `length` a number or `[*B]`."""
        self.score.check(layout)
        check_per_head("s", self.s, "", layout)
        shape = () if self.length is None else np.shape(self.length)
        if shape not in ((), layout.batch):
            raise ValueError(
                f"length has shape {list(shape)} but must be a number or "
                f"[*B] = {list(layout.batch)}"
            )

    def prepare(self, query: Array, key: Array) -> Sides:
        """The inner score's data, and ln(n) for each query row."""
        inner = self.score.prepare(query, key)
        length = key.shape[-2] if self.length is None else self.length
        dtype = stats_dtype(query.dtype, key.dtype)
        log = jnp.log(jnp.maximum(jnp.asarray(length).astype(dtype), 1))
        rows = (*query.shape[:-3], 1, query.shape[-2])
        log = jnp.broadcast_to(log[..., None, None] if log.ndim else log, rows)
        return Sides((inner.query, log), inner.key, inner.pair)

    def per_head(self) -> "LogLength":
        """`s` with its head axis; `prepare` has used the length."""
        return LogLength(self.score.per_head(), head_axis(self.s, 0), None)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """Scales each row."""
        inner, log = sides.query
        scores = self.score.block(sides._replace(query=inner), query_positions, key_positions)
        factor = jnp.asarray(self.s).astype(scores.dtype) * log.astype(scores.dtype)
        return keep_masked(self.score, scores, lambda x: x * factor[:, None])


def _score(score: Any) -> Score:
    if not isinstance(score, Score):
        raise TypeError(f"score must be a score object, got {type(score).__name__}")
    return score


def temperature(score: Score, tau: Any) -> Score:
    """`score / tau`: tau above 1 flattens the weights, below 1 sharpens them.

    Args:
        score: any score object.
        tau: a positive number, a scalar array or one entry for each query head `[N]`; arrays get
            gradients.

    Returns:
        A score object.

    Raises:
        ValueError: a plain number that is not positive.
    """
    check_parameter("tau", tau)
    if np.ndim(tau) == 0 and is_concrete(tau):
        check_positive("tau", tau)
    return Temperature(_score(score), tau)


def soft_cap(score: Score, cap: Any) -> Score:
    """`cap · tanh(score / cap)`: scores stay within ±cap, with a gradient everywhere.

    Args:
        score: any score object; the cap applies to scores, before any bias.
        cap: a positive number.

    Returns:
        A score object.

    References:
        Gemma Team 2024, arXiv:2408.00118, §2.
    """
    return SoftCap(_score(score), check_positive("cap", cap))


def clip(score: Score, low: Any, high: Any) -> Score:
    """`min(max(score, low), high)`; no gradient flows where it clips.

    Args:
        score: any score object.
        low: the least value.
        high: the largest value, above `low`.

    Returns:
        A score object.
    """
    low, high = check_number("low", low), check_number("high", high)
    if not low < high:
        raise ValueError(f"low must be below high, got low {low} and high {high}")
    return Clip(_score(score), low, high)


def log_length(score: Score, s: Any, length: Any = None) -> Score:
    """`s · ln(n) · score`: keeps the weights as sharp on long inputs as on short ones.

    Args:
        score: any score object.
        s: a number, a scalar array or `[N]`; `1 / math.log(n_train)` leaves length n_train as
            it is.
        length: n, a number or one for each example `[*B]`; by default the key length S.

    Returns:
        A score object.

    References:
        Chiang, Cholak 2022, arXiv:2202.12172, §5.3.
    """
    check_parameter("s", s)
    if length is not None:
        check_parameter("length", length)
    if isinstance(s, (int, float)) and not math.isfinite(s):
        raise ValueError(f"s must be finite, got {s}")
    return LogLength(_score(score), s, length)
