"""The parameters of a layer's score, in Linen's tree."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._modules import recipes
from attention_jax._modules.arguments import cast
from attention_jax._modules.recipes import ScoreRecipe, Sizes
from attention_jax.scores import Score

ScoreFactory = Callable[[int, int, Any], Score]
AnyScore = Score | ScoreRecipe | ScoreFactory | str | None


def is_factory(score: AnyScore) -> bool:
    """Whether the score is a function that makes one from the layer's sizes."""
    return callable(score) and not isinstance(score, Score | ScoreRecipe)


def check_score(score: AnyScore) -> None:
    """Raises, while a layer is written down, what its score would raise when it is used."""
    if not is_factory(score):
        recipes.recipe(score)  # type: ignore[arg-type]


class ScoreParameters(nn.Module):
    """The parameters of a layer's score; called, it gives the score itself.

    Floating arrays are parameters and train. Arrays of another kind are constants: those of a score
    object stay in it, those that a factory draws are variables of the collection "constants".

    Args:
        score: As in `MultiHeadAttention`.
        dtype: The dtype of floating arrays in the computation; None is their own.
    """

    score: AnyScore = None
    dtype: Any = None

    @nn.compact
    def __call__(self, sizes: Sizes) -> Score:
        """The score with the present values of its parameters."""
        score, drawn = self.score, is_factory(self.score)
        if drawn:
            # Only the structure of what it makes is used after `init`, whatever the key.
            key = self.make_rng("params") if self.is_initializing() else jax.random.key(0)
            score = self.score(sizes.num_heads, sizes.query_depth, key)  # type: ignore[misc,operator]
            if not isinstance(score, Score):
                raise TypeError(
                    "a score factory (num_heads, head_dim, key) must return a Score, "
                    f"got {type(score).__name__}"
                )
        recipe = recipes.recipe(score)  # type: ignore[arg-type]
        values = {}
        for name, draw in recipe.parameters(sizes).items():
            kind = jax.eval_shape(draw, jax.random.key(0)).dtype
            if jnp.issubdtype(kind, jnp.floating):
                values[name] = self._cast(self.param(name, draw))
            elif drawn:
                values[name] = self.variable("constants", name, draw, jax.random.key(0)).value
            else:
                values[name] = draw(jax.random.key(0))
        return recipe.bare().build(values)

    def _cast(self, value: Array) -> Array:
        return jnp.asarray(cast(value, self.dtype))
