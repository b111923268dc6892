"""Recipes of scales from the literature: each wraps a score and sets its temperature.

    e(t, s) = scale · score(q_t, k_s)

The fixed scale is `scaled_dot`'s argument; for queries and keys of unit norm see `cosine`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import scores
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax.kernels.request import Result
from attention_jax.layers.arguments import check_choice
from attention_jax.layers.recipes import (
    Dot,
    Draw,
    ScoreRecipe,
    Sizes,
    positive,
    positive_inverse,
    recipe,
)
from attention_jax.scores import Score
from attention_jax.scores.log_position import LogPosition


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapped(ScoreRecipe):
    """A recipe that wraps another, whose parameters are named `score_<name>`."""

    score: Any = None

    def inner(self) -> ScoreRecipe:
        """The recipe of the wrapped score; None is the dot product."""
        return Dot() if self.score is None else recipe(self.score)

    def __post_init__(self) -> None:
        object.__setattr__(self, "score", self.inner())

    def bare(self) -> "Wrapped":
        """The recipe without arrays, including the inner one."""
        return dataclasses.replace(self, score=self.inner().bare())

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The inner score's initialisers."""
        return {f"score_{name}": draw for name, draw in self.inner().parameters(sizes).items()}

    def inside(self, values: Mapping[str, Array]) -> Score:
        """The inner score with these values."""
        start = len("score_")
        own = {name[start:]: v for name, v in values.items() if name.startswith("score_")}
        return self.inner().build(own)

    def at_first(self, sizes: Sizes, given: float | None) -> float:
        """The initial scale: 1/√H for the dot product, else 1."""
        if given is not None:
            return given
        return sizes.query_depth**-0.5 if isinstance(self.inner(), Dot) else 1.0


def _times(score: Score, scale: Array) -> Score:
    """`scale · score`, a scalar or one scale for each head."""
    if score == scores.dot():
        return scores.scaled_dot(scale)
    return scores.temperature(score, 1 / scale)


@dataclasses.dataclass(frozen=True, repr=False)
class LearnedScale(Wrapped):
    """A learned positive scale."""

    initial: float | int | None = None
    per: str = "head"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("per", self.per, "head", "layer")
        _check_positive("initial", self.initial)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`raw_scale`, `[N]` or a scalar, from which `positive` makes the scale."""
        shape = (sizes.num_heads,) if self.per == "head" else ()
        start = positive_inverse(jnp.asarray(self.at_first(sizes, self.initial), jnp.float32))
        raw = start.astype(sizes.param_dtype)
        return {**super().parameters(sizes), "raw_scale": lambda key: jnp.full(shape, raw)}

    def build(self, values: Mapping[str, Array]) -> Score:
        """The inner score times the scale."""
        return _times(self.inside(values), positive(values["raw_scale"]))


@dataclasses.dataclass(frozen=True, repr=False)
class EntropyScale(Wrapped):
    """A scale for each head that is adapted to the entropy of its weights."""

    target: float | int = math.nan  # always to be given
    rate: float | int = 0.1
    initial: float | int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target", "rate", "initial"):
            _check_positive(name, getattr(self, name))

    @property
    def adapted(self) -> tuple[str, ...]:
        """The logarithm of the scale is a state, not a parameter."""
        return ("log_scale",)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`log_scale [N]`, float32."""
        start = math.log(self.at_first(sizes, self.initial))
        heads = (sizes.num_heads,)
        draw = {"log_scale": lambda key: jnp.full(heads, start, jnp.float32)}
        return {**super().parameters(sizes), **draw}

    def build(self, values: Mapping[str, Array]) -> Score:
        """The inner score times the scale, which has no gradient."""
        scale = jnp.exp(jax.lax.stop_gradient(values["log_scale"]))
        return _times(self.inside(values), scale)

    def adapt(self, values: Mapping[str, Array], result: Result) -> dict[str, Array]:
        """Updates the scale by the mean entropy of each head's non-empty rows."""
        assert result.rows is not None  # the request is for statistics where `adapts`
        assert result.empty is not None
        entropy, visible = jax.lax.stop_gradient(result.rows.entropy), ~result.empty
        axes = tuple(i for i in range(entropy.ndim) if i != entropy.ndim - 2)
        count = jnp.sum(visible, axis=axes)
        total = jnp.sum(jnp.where(visible, entropy, 0), axis=axes)
        mean = total / jnp.maximum(count, 1).astype(total.dtype)
        change = jnp.where(count > 0, mean - self.target, 0).astype(jnp.float32)
        return {"log_scale": values["log_scale"] + self.rate * jnp.clip(change, -1.0, 1.0)}


@dataclasses.dataclass(frozen=True, repr=False)
class LogLength(Wrapped):
    """A scale proportional to the logarithm of the number of keys."""

    train_length: int = 0  # always to be given
    learn: bool = False
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("train_length", self.train_length, 2)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """With `learn`, `raw_s [N]`, from which `positive` makes s."""
        inner = super().parameters(sizes)
        if not self.learn:
            return inner
        start = positive_inverse(jnp.asarray(1 / math.log(self.train_length), jnp.float32))
        shape, raw = (sizes.num_heads,), start.astype(sizes.param_dtype)
        return {**inner, "raw_s": lambda key: jnp.full(shape, raw)}

    def inner(self) -> ScoreRecipe:
        """None is the scaled dot product."""
        return recipe(self.score)

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.log_length`, or the same by positions."""
        s = positive(values["raw_s"]) if self.learn else 1 / math.log(self.train_length)
        score = self.inside(values)
        if self.causal:
            return LogPosition(score, s if self.learn else np.float32(s))
        return scores.log_length(score, s)


def _check_positive(name: str, value: float | int | None) -> None:
    if value is not None and not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a positive number, got {type(value).__name__}")
    if value is not None and not 1e-4 < value < math.inf:
        raise ValueError(f"{name} must be positive (above 1e-4), got {value}")


def learned_scale(
    score: Any = None, *, initial: float | int | None = None, per: str = "head"
) -> ScoreRecipe:
    """A learned scale, `e = (softplus(r) + 1e-4) · score`, positive for any raw value r.

    Args:
        score: The wrapped score: a score, a recipe or a name; None is the dot product.
        initial: The initial scale; None is 1/√H for the dot product, 1 for another score.
        per: "head" for one scale per head, "layer" for one shared by all heads.

    Returns:
        A recipe, with the parameter `raw_scale`, `[N]` or a scalar.

    References:
        Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245, §3 (a
        learned scale in place of 1/√H).
    """
    return LearnedScale(score, initial, per)


def entropy_scale(
    target: float | int,
    score: Any = None,
    *,
    rate: float | int = 0.1,
    initial: float | int | None = None,
) -> ScoreRecipe:
    """A scale for each head, adapted to a target entropy of the weights.

        ln scale ← ln scale + rate · clip(mean entropy − target, −1, 1)    in each training call

    The scale is a state like a running mean: it is updated if `deterministic` is False, in the call
    or by `train()`, and has no gradient.

    Args:
        target: The target mean entropy of a row, in nats; ln(n) is that of n equal weights.
        score: The wrapped score: a score, a recipe or a name; None is the dot product.
        rate: The step size.
        initial: The initial scale; None is 1/√H for the dot product, 1 for another score.

    Returns:
        A recipe, with the state `log_scale [N]`.

    References:
        Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy
        Collapse", arXiv:2303.06296, §3 (controls the entropy by the norm of the weights).
    """
    return EntropyScale(score, target, rate, initial)


def log_length(
    score: Any = None, *, train_length: int, learn: bool = False, causal: bool = False
) -> ScoreRecipe:
    """Log-length scaling, `e = s · ln(n) · score`: equally sharp weights at all lengths.

    Args:
        score: The wrapped score: a score, a recipe or a name; None is the scaled dot product.
        train_length: The length with unchanged scores: s is initially 1 / ln(train_length).
        learn: Whether s is learned, one positive value for each head.
        causal: Whether n is the number of keys at or before a query, p + 1, which is the same in a
            full pass and over a cache. Otherwise n is the number of keys S; over a cache, the
            number of tokens so far, so that a step equals the last row of a full pass over them.

    Returns:
        A recipe; with `learn` it has the parameter `raw_s [N]`.

    References:
        Chiang, Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention",
        arXiv:2202.12172, §5.3.
    """
    return LogLength(score, train_length, learn, causal)
