"""Position schemes of a layer: what to draw, how queries and keys are turned, what bias is added.

As with scores, a recipe is the part before the layer: for the layer's sizes it names parameters and
draws their first values, and for any values of them it turns queries and keys or builds the bias.
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

# What `positions=` takes; what else is given gets an error of ours.
AnyPositions = Annotated[Any, "PositionRecipe | Term | str | None"]


@dataclasses.dataclass(frozen=True, repr=False)
class PositionRecipe:
    """A position scheme whose parameters, if any, the layer makes and owns; frozen."""

    __repr__ = ScoreRecipe.__repr__

    def bare(self) -> "PositionRecipe":
        """The part that a layer keeps, without arrays."""
        return self

    def check(self, sizes: Sizes) -> None:
        """Raises a ValueError where the layer's sizes do not suit the scheme."""

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """For each parameter by name, a function from a PRNG key to its first value."""
        del sizes
        return {}

    @property
    def adds_bias(self) -> bool:
        """Whether the scheme adds a bias to the scores."""
        return type(self).bias is not PositionRecipe.bias

    def rotate(self, x: Array, at: Any) -> Array:
        """Queries or keys `[*B, T, N, H]` at positions `at`, None for 0..T-1."""
        del at
        return x

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term | None:
        """What is added to the scores, with these values of the parameters."""
        del values, num_heads
        return None


@dataclasses.dataclass(frozen=True, repr=False)
class Rotary(PositionRecipe):
    """Queries and keys turned by their position."""

    base: float | int = 10_000.0
    fraction: float | int = 1.0
    interleaved: bool = False
    scaling: Any = None

    def check(self, sizes: Sizes) -> None:
        """The width that is turned must be even, and one for queries and keys."""
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
    """The authors' slopes, which stay as they are."""

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
    """A learned vector for each clipped distance, matched with the query."""

    max_distance: int = 16

    def __post_init__(self) -> None:
        check_count("max_distance", self.max_distance, 0)

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`table [2k + 1, H]`, Xavier uniform, as every kernel of the article's model."""
        shape, dtype = (2 * self.max_distance + 1, sizes.query_depth), sizes.param_dtype
        limit = math.sqrt(6 / sum(shape))
        return {"table": lambda key: jax.random.uniform(key, shape, dtype, -limit, limit)}

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """`positions.shaw(table)`."""
        del num_heads
        return positions.shaw(values["table"])


@dataclasses.dataclass(frozen=True, repr=False)
class GivenBias(PositionRecipe):
    """A bias object that was there before the layer: its arrays are the first values."""

    given: Given

    def bare(self) -> "GivenBias":
        """The recipe without the arrays."""
        return GivenBias(self.given.bare())

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The object's arrays, each under its path in it."""
        return self.given.parameters(sizes)

    def bias(self, values: Mapping[str, Array], num_heads: int) -> Term:
        """The object with these arrays in it."""
        del num_heads
        return self.given.build(values)


def rotary(
    base: float | int = 10_000.0,
    fraction: float | int = 1.0,
    interleaved: bool = False,
    *,
    scaling: Any = None,
) -> PositionRecipe:
    """Rotary positions: queries and keys are turned by their position.

    Args:
        base: The slowest wavelength is about 2π·base.
        fraction: The share of a head's channels that are turned; fraction · H must be even.
        interleaved: Whether pairs are channels (2i, 2i + 1); by default they are (i, i + W / 2).
        scaling: One of `attention_jax.positions`' scalings, for inputs longer than trained.

    Returns:
        A recipe for `positions=`; no parameters.

    References:
        Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34.
    """
    return Rotary(base, fraction, interleaved, scaling)


def alibi() -> PositionRecipe:
    """Linear biases, `bias(t, s) = -slope_n · |distance|`, with the authors' fixed slopes.

    For slopes that train give the object, `positions=attention_jax.positions.alibi(num_heads)`.

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
        buckets: How many; half of them for keys after the query where `bidirectional`.
        bidirectional: Whether keys before and after have buckets of their own.
        max_distance: From this distance on there is one bucket.

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
        ValueError: If a name is not known; the message lists those that are.
        TypeError: If it is none of these.
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
