"""Recipes of position schemes: their parameters, rotation of queries and keys, and bias.

For the layer's sizes a recipe defines parameters and their initialisation; for given parameter
values it rotates queries and keys or builds the bias.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import positions
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import arange
from attention_jax._core.term import Term
from attention_jax.layers.recipes import Draw, Given, ScoreRecipe, Sizes

# The values of `positions=`; `recipe` raises a clear error for all others.
AnyPositions = Annotated[Any, "PositionRecipe | Term | str | None"]


@dataclasses.dataclass(frozen=True, repr=False)
class PositionRecipe:
    """Base of position schemes whose parameters, if any, the layer creates; frozen."""

    __repr__ = ScoreRecipe.__repr__

    def bare(self) -> "PositionRecipe":
        """The recipe without arrays, which a layer stores."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Raises a ValueError if the layer's sizes do not suit the scheme."""

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The initialisers `draw(key)` of the parameters, by name."""
        del sizes
        return {}

    @property
    def adds_bias(self) -> bool:
        """Whether the scheme adds a bias to the scores."""
        return type(self).bias is not PositionRecipe.bias

    def rotate(self, x: Array, at: Any) -> Array:
        """Rotates queries or keys `[*B, T, N, H]` at positions `at`, None for 0..T-1."""
        del at
        return x

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term | None:
        """The bias with these values of the parameters."""
        del values, num_heads
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary(PositionRecipe):
    """Rotation of queries and keys by their position."""

    base: float | int = 10_000.0
    fraction: float | int = 1.0
    interleaved: bool = False
    scaling: Any = None

    def check(self, sizes: Sizes) -> None:
        """The rotated width must be even and equal for queries and keys."""
        x = jax.ShapeDtypeStruct((1, sizes.num_heads, sizes.query_depth), jnp.float32)
        jax.eval_shape(lambda x: self.rotate(x, None), x)

    def rotate(self, x: Array, at: Any) -> Array:
        """`positions.rotary`."""
        at = arange(x.shape[-3]) if at is None else at
        return positions.rotary(
            x, at, self.base, self.fraction, self.interleaved, scaling=self.scaling
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Alibi(PositionRecipe):
    """Linear biases with the paper's fixed slopes."""

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """`positions.alibi(N)`."""
        del values
        return positions.alibi(num_heads)


@dataclasses.dataclass(frozen=True, repr=False)
class RelativeBias(PositionRecipe):
    """A learned bias for each head and bucket of distances."""

    buckets: int = 32
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        self._of(np.zeros((1, check_count("buckets", self.buckets, 1)), np.float32))

    def _of(self, table: Any) -> Term:
        return positions.relative_bias(table, self.bidirectional, self.max_distance)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`table [N, buckets]`, normal with standard deviation 0.02."""
        shape, dtype = (sizes.num_heads, self.buckets), sizes.param_dtype
        return {"table": lambda key: 0.02 * jax.random.normal(key, shape, dtype)}

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """`positions.relative_bias(table)`."""
        del num_heads
        return self._of(values["table"])


@dataclasses.dataclass(frozen=True, repr=False)
class Shaw(PositionRecipe):
    """A learned vector for each clipped distance, multiplied with the query."""

    max_distance: int = 16

    def __post_init__(self) -> None:
        check_count("max_distance", self.max_distance, 0)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`table [2k + 1, H]`, Xavier uniform, as all kernels of the paper's model."""
        shape, dtype = (2 * self.max_distance + 1, sizes.query_depth), sizes.param_dtype
        limit = math.sqrt(6 / sum(shape))
        return {"table": lambda key: jax.random.uniform(key, shape, dtype, -limit, limit)}

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """`positions.shaw(table)`."""
        del num_heads
        return positions.shaw(values["table"])


@dataclasses.dataclass(frozen=True, repr=False)
class GivenBias(PositionRecipe):
    """The recipe of a given bias object: its arrays are the initial values."""

    given: Given

    def bare(self) -> "GivenBias":
        """The recipe without the arrays."""
        return GivenBias(self.given.bare())

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The object's arrays by path."""
        return self.given.parameters(sizes)

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """The object with these arrays."""
        del num_heads
        return self.given.build(values)


def rotary(
    base: float | int = 10_000.0,
    fraction: float | int = 1.0,
    interleaved: bool = False,
    *,
    scaling: Any = None,
) -> PositionRecipe:
    """Rotary position embedding: rotates queries and keys by their position.

    Args:
        base: The slowest wavelength is about 2π·base.
        fraction: The share of a head's channels that are rotated; fraction · H must be even.
        interleaved: Whether pairs are channels (2i, 2i + 1); by default they are (i, i + W / 2).
        scaling: A scaling of `attention_jax.positions`, for inputs longer than those in training.

    Returns:
        A recipe for `positions=`; no parameters.

    References:
        Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34.
    """
    return Rotary(base, fraction, interleaved, scaling)


def alibi() -> PositionRecipe:
    """ALiBi, linear biases `bias(t, s) = -slope_n · |distance|` with the paper's fixed slopes.

    For trainable slopes pass the object, `positions=attention_jax.positions.alibi(num_heads)`.

    Returns:
        A recipe for `positions=`; no parameters.

    References:
        Press, Smith, Lewis 2022, "Train Short, Test Long", arXiv:2108.12409, §3.
    """
    return Alibi()


def relative_bias(
    buckets: int = 32, *, bidirectional: bool = True, max_distance: int = 128
) -> PositionRecipe:
    """T5's relative bias: a learned number for each head and bucket of distances.

    Args:
        buckets: Number of buckets; half of them for keys after the query if `bidirectional`.
        bidirectional: Whether keys before and after the query have separate buckets.
        max_distance: Distances from this one on share a bucket.

    Returns:
        A recipe for `positions=`, with the parameter `table [N, buckets]`.

    References:
        Raffel et al. 2020, arXiv:1910.10683, §2.1.
    """
    return RelativeBias(buckets, bidirectional, max_distance)


def shaw(max_distance: int = 16) -> PositionRecipe:
    """Relative positions of Shaw et al., `bias(t, s) = q_t · table[clip(s − t)] / √H`.

    Args:
        max_distance: k; distances are clipped to -k..k.

    Returns:
        A recipe for `positions=`, with the parameter `table [2k + 1, H]`, shared by the heads.

    References:
        Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations",
        arXiv:1803.02155, eq. 4.
    """
    return Shaw(max_distance)


NAMED: dict[str, PositionRecipe] = {
    "rotary": Rotary(),
    "alibi": Alibi(),
    "relative_bias": RelativeBias(),
    "shaw": Shaw(),
}


def recipe(given: AnyPositions) -> PositionRecipe:
    """The recipe of a `positions=` argument.

    Args:
        given: A recipe, a bias object, one of the names of `NAMED`, or None for none.

    Raises:
        ValueError: If a name is unknown; the message lists the known ones.
        TypeError: If it has another type.
    """
    if given is None:
        return PositionRecipe()
    if isinstance(given, PositionRecipe):
        return given
    if isinstance(given, Term):
        return GivenBias(Given.of(given))
    if isinstance(given, str):
        if given not in NAMED:
            raise ValueError(f"unknown positions {given!r}: the names are {', '.join(NAMED)}")
        return NAMED[given]
    raise TypeError(
        f"positions must be a recipe, a bias object or a name, got {type(given).__name__}"
    )
