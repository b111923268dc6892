"""Attention problems: inputs in NumPy, with their reference results.

Sizes are named by the letters of the library: batch `*B`, lengths `T` and `S`, heads `N` and `K`,
depths `H` and `V`, hidden width `A`. The defaults differ from each other, and no block size divides
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from attention_jax.testing.reference import (
    Gradients,
    Reference,
    reference_attention,
    reference_gradients,
)
from attention_jax.testing.reference_scores import SCORES, RowScore


class Sizes(NamedTuple):
    """The sizes of a problem, by letter."""

    batch: tuple[int, ...] = (2,)
    T: int = 7
    S: int = 11
    N: int = 4
    K: int = 2
    H: int = 5
    V: int = 6
    A: int = 3

    @property
    def pairs(self) -> tuple[int, ...]:
        """The shape of anything per pair, `[*B, N, T, S]`."""
        return (*self.batch, self.N, self.T, self.S)

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the output, `[*B, T, N, V]`."""
        return (*self.batch, self.T, self.N, self.V)


@dataclass(frozen=True)
class Problem:
    """Inputs of attention as NumPy arrays.

    Attributes:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, H]`.
        value: `[*B, S, K, V]`.
        mask: bool, broadcasting to `[*B, N, T, S]`, or None.
        bias: float, broadcasting to `[*B, N, T, S]`, or None.
        score: the name of a score, or a `RowScore`.
        params: the score's parameters by name.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None = None
    bias: np.ndarray | None = None
    score: str | RowScore = "scaled_dot"
    params: Mapping[str, np.ndarray] = field(default_factory=dict)

    def reference(self, **changes: Any) -> Reference:
        """The result of `reference_attention`; `changes` are further arguments."""
        request = {"score": self.score, "params": self.params, "mask": self.mask, "bias": self.bias}
        return reference_attention(self.query, self.key, self.value, **{**request, **changes})

    def gradients(self, d_out: np.ndarray, **changes: Any) -> Gradients:
        """The result of `reference_gradients`; `changes` are further arguments."""
        request = {"score": self.score, "params": self.params, "mask": self.mask, "bias": self.bias}
        return reference_gradients(
            self.query, self.key, self.value, d_out, **{**request, **changes}
        )

    def floats(self) -> dict[str, Any]:
        """The differentiable inputs: query, key, value, and bias and params if there are any."""
        parts: dict[str, Any] = {"query": self.query, "key": self.key, "value": self.value}
        if self.bias is not None:
            parts["bias"] = self.bias
        if self.params:
            parts["params"] = dict(self.params)
        return parts

    def moved(self, tangent: Mapping[str, Any], step: float) -> "Problem":
        """The problem at `floats() + step · tangent`, in float64."""

        def add(x: Any, dx: Any) -> Any:
            return np.asarray(x, np.float64) + step * np.asarray(dx, np.float64)

        parts = {name: x for name, x in self.floats().items() if name != "params"}
        moved = {name: add(x, tangent[name]) for name, x in parts.items()}
        params = {name: add(x, tangent["params"][name]) for name, x in self.params.items()}
        return replace(self, **moved, params=params)


def random_params(
    rng: np.random.Generator, score: str, sizes: Sizes, *, per_head: bool = False
) -> dict[str, np.ndarray]:
    """Standard normal parameters of a score, shared or per query head."""
    known, lead = SCORES[score], (sizes.N,) if per_head else ()

    def size(axis: str) -> int:
        return sum(getattr(sizes, letter) for letter in axis.split("+"))

    return {
        name: np.asarray(rng.normal(size=(*lead, *map(size, axes.split()))), np.float32)
        for name, axes in known.parameters.items()
        if known.drawn
    }


def random_mask(rng: np.random.Generator, shape: tuple[int, ...], keep: float = 0.6) -> np.ndarray:
    """A random mask in which every row has a visible key, if there are keys."""
    mask = rng.random(shape) < keep
    if mask.size:
        visible = rng.integers(shape[-1], size=shape[:-1])
        np.put_along_axis(mask, visible[..., None], True, axis=-1)
    return mask


def random_problem(
    rng: np.random.Generator,
    sizes: Sizes | None = None,
    *,
    mask: bool = False,
    bias: bool = False,
    score: str = "scaled_dot",
    per_head: bool = False,
    dtype: Any = "float32",
) -> Problem:
    """Standard normal inputs of the given sizes.

    Args:
        rng: the random generator.
        sizes: sizes by letter.
        mask: add a random mask `[*B, N, T, S]` without empty rows.
        bias: add a standard normal bias `[*B, N, T, S]`.
        score: name of the score, whose parameters are drawn too.
        per_head: whether each query head has its own parameters.
        dtype: dtype of query, key, value and bias; parameters are float32, or float64 if it is.
    """
    sizes = Sizes() if sizes is None else sizes
    kind = jnp.dtype(dtype)

    def normal(*shape: int) -> np.ndarray:
        return np.asarray(rng.normal(size=shape)).astype(kind)

    params = random_params(rng, score, sizes, per_head=per_head)
    if kind == np.float64:
        params = {name: x.astype(kind) for name, x in params.items()}
    return Problem(
        query=normal(*sizes.batch, sizes.T, sizes.N, sizes.H),
        key=normal(*sizes.batch, sizes.S, sizes.K, sizes.H),
        value=normal(*sizes.batch, sizes.S, sizes.K, sizes.V),
        mask=random_mask(rng, sizes.pairs) if mask else None,
        bias=normal(*sizes.pairs) if bias else None,
        score=score,
        params=params,
    )
