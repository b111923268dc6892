"""The parameters of a layer's score and position scheme as Linen variables."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.term import Term
from attention_jax.kernels.request import Result
from attention_jax.layers import position_recipes, recipes
from attention_jax.layers.arguments import cast
from attention_jax.layers.position_recipes import AnyPositions as AnyPositions
from attention_jax.layers.recipes import KERNEL_INIT, Draw, Initializer, ScoreRecipe, Sizes
from attention_jax.layers.recipes import AnyScore as AnyScore
from attention_jax.layers.recipes import check_score as check_score
from attention_jax.layers.recipes import is_factory as is_factory
from attention_jax.scores import Score


class Parameters(nn.Module, kw_only=True):
    """The parameters of a recipe.

    Floating-point arrays are parameters. Other arrays are constants: those of an object stay in it,
    those made by a factory are variables of the collection "constants".

    Args:
        dtype: The computation dtype of floating-point arrays; None is the arrays' dtype.
        param_dtype: The dtype of the parameters.
        kernel_init: The initialiser of kernels.
    """

    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = KERNEL_INIT

    @nn.nowrap
    def _own(self, sizes: Sizes) -> Sizes:
        """Adds the dtype and initialiser to the sizes: Flax treats a dtype argument as an array."""
        return sizes._replace(param_dtype=self.param_dtype, kernel_init=self.kernel_init)

    @nn.compact
    def values(
        self, draws: Mapping[str, Draw], *, drawn: bool = False, adapted: tuple[str, ...] = ()
    ) -> dict[str, Array]:
        """The current values of the parameters, initialised by their functions at `init`.

        Args:
            draws: The functions, by name.
            drawn: Whether a factory made them.
            adapted: The names of states, which are variables of the collection "adapted".
        """
        found = {}
        for name, draw in draws.items():
            if name in adapted:
                found[name] = self.variable("adapted", name, draw, jax.random.key(0)).value
                continue
            kind = jax.eval_shape(draw, jax.random.key(0)).dtype
            if jnp.issubdtype(kind, jnp.floating):
                found[name] = jnp.asarray(cast(self.param(name, draw), self.dtype))
            elif drawn:
                found[name] = self.variable("constants", name, draw, jax.random.key(0)).value
            else:
                found[name] = draw(jax.random.key(0))
        return found


class ScoreParameters(Parameters):
    """The parameters of a layer's score; calling it returns the score.

    Args:
        score: As in `MultiHeadAttention`.
    """

    score: AnyScore = None

    def __call__(self, sizes: Sizes) -> Score:
        """The score with the current values of its parameters."""
        recipe, values = self._present(sizes)
        return recipe.build(values)

    @property
    def adapts(self) -> bool:
        """Whether there are states that training calls update."""
        return not is_factory(self.score) and bool(recipes.recipe(self.score).adapted)

    def adapt(self, sizes: Sizes, result: Result) -> None:
        """Updates the states after a training call, in the mutable collection "adapted"."""
        if self.is_initializing():
            return
        recipe, values = self._present(sizes)
        for name, value in recipe.adapt(values, result).items():
            self.put_variable("adapted", name, value)

    @nn.nowrap
    def _present(self, sizes: Sizes) -> tuple[ScoreRecipe, dict[str, Array]]:
        sizes, score, drawn = self._own(sizes), self.score, is_factory(self.score)
        if drawn:
            # After `init` only the structure of the result is used, which is the same for any key.
            key = self.make_rng("params") if self.is_initializing() else jax.random.key(0)
            score = self.score(sizes.num_heads, sizes.query_depth, key)
            if not isinstance(score, Score):
                raise TypeError(
                    "a score factory (num_heads, head_dim, key) must return a Score, "
                    f"got {type(score).__name__}"
                )
        recipe = recipes.recipe(score)
        draws = recipe.parameters(sizes)
        return recipe.bare(), self.values(draws, drawn=drawn, adapted=recipe.adapted)


class PositionParameters(Parameters):
    """The parameters of a layer's position scheme; calling it returns the bias.

    Args:
        positions: As in `MultiHeadAttention`.
    """

    positions: AnyPositions = None

    def __call__(self, sizes: Sizes) -> Term | None:
        """The bias with the current values of its parameters; None for no bias."""
        recipe, sizes = position_recipes.recipe(self.positions), self._own(sizes)
        recipe.check(sizes)
        return recipe.bare().bias(self.values(recipe.parameters(sizes)), sizes.num_heads)

    @nn.nowrap
    def rotate(self, x: Array, at: Any) -> Array:
        """Rotates queries or keys `[*B, T, N, H]` at positions `at`, None for 0..T-1."""
        return position_recipes.recipe(self.positions).rotate(x, at)
