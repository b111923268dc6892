"""The parameters of a layer's score and position scheme as NNX variables."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.term import Term
from attention_jax.kernels.request import Result
from attention_jax.layers import position_recipes, recipes
from attention_jax.layers.arguments import cast
from attention_jax.layers.position_recipes import AnyPositions
from attention_jax.layers.recipes import Draw, ScoreRecipe, Sizes
from attention_jax.scores import Score

ScoreFactory = Callable[[int, int, nnx.Rngs], Score]
AnyScore = Score | ScoreRecipe | ScoreFactory | str | None


class Hash(nnx.Variable):
    """The key of a random hash, which is constant."""


class Adapted(nnx.Variable):
    """A state of a score, without gradient, that training calls update."""


class Parameters(nnx.Module):
    """The parameters of a recipe.

    Floating-point arrays are `nnx.Param`; other arrays are plain variables.
    """

    def _draw(
        self,
        draws: Mapping[str, Draw],
        dtype: Any,
        rngs: nnx.Rngs,
        adapted: tuple[str, ...] = (),
    ) -> None:
        self.names = tuple(draws)
        self.dtype = dtype
        for name, draw in draws.items():
            # Only existing parameters consume a key: a layer with the default score is initialised
            # to the same numbers as Flax's.
            value = draw(rngs.params())
            kind = nnx.Param if jnp.issubdtype(value.dtype, jnp.floating) else nnx.Variable
            setattr(self, name, (Adapted if name in adapted else kind)(value))

    def values(self) -> dict[str, Array]:
        """The current values, floating-point ones in the layer's dtype."""
        return {name: self._value(name) for name in self.names}

    def _value(self, name: str) -> Array:
        value: jax.Array = getattr(self, name)[...]
        trains = isinstance(getattr(self, name), nnx.Param)
        return jnp.asarray(cast(value, self.dtype)) if trains else value


class ScoreParameters(Parameters):
    """The parameters of a layer's score; calling it returns the score."""

    def __init__(self, score: AnyScore, sizes: Sizes, *, dtype: Any = None, rngs: nnx.Rngs) -> None:
        if callable(score) and not isinstance(score, Score | ScoreRecipe):
            made = score(sizes.num_heads, sizes.query_depth, rngs)
            if not isinstance(made, Score):
                raise TypeError(
                    "a score factory (num_heads, head_dim, rngs) must return a Score, "
                    f"got {type(made).__name__}"
                )
            score = made
        recipe = recipes.recipe(score)
        self.recipe = recipe.bare()
        self._draw(recipe.parameters(sizes), dtype, rngs, recipe.adapted)

    @property
    def adapts(self) -> bool:
        """Whether there are states that training calls update."""
        return bool(self.recipe.adapted)

    def adapt(self, sizes: Sizes, result: Result) -> None:
        """Updates the states after a training call."""
        del sizes
        for name, value in self.recipe.adapt(self.values(), result).items():
            getattr(self, name)[...] = value

    def __call__(self, sizes: Sizes | None = None) -> Score:
        """The score with the current values of its parameters, floating-point ones in `dtype`."""
        del sizes  # known since construction
        return self.recipe.build(self.values())


class PositionParameters(Parameters):
    """The parameters of a layer's position scheme; calling it returns the bias."""

    def __init__(
        self, given: AnyPositions, sizes: Sizes, *, dtype: Any = None, rngs: nnx.Rngs
    ) -> None:
        recipe = position_recipes.recipe(given)
        recipe.check(sizes)
        self.recipe = recipe.bare()
        self._draw(recipe.parameters(sizes), dtype, rngs)

    def __call__(self, sizes: Sizes) -> Term | None:
        """The bias with the current values of its parameters; None for no bias."""
        return self.recipe.bias(self.values(), sizes.num_heads)

    def rotate(self, x: Array, at: Any) -> Array:
        """Rotates queries or keys `[*B, T, N, H]` at positions `at`, None for 0..T-1."""
        return self.recipe.rotate(x, at)
