"""Position schemes whose parameters a layer makes and owns: what `positions=` takes.

    layer = MultiHeadAttention(8, 64, positions=rotary(), rngs=rngs)

A scheme turns queries and keys, or adds a bias to the scores. Either goes by absolute positions, so
it is the same in a full pass and in a step over a cache.
"""

from typing import Any

from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.term import Term
from attention_jax._modules import places
from attention_jax._modules.places import PositionRecipe
from attention_jax._modules.places import alibi as alibi
from attention_jax._modules.places import relative_bias as relative_bias
from attention_jax._modules.places import rotary as rotary
from attention_jax._modules.places import shaw as shaw
from attention_jax._modules.recipes import Sizes
from attention_jax.nnx.scores import Parameters

AnyPositions = PositionRecipe | Term | str | None


class PositionParameters(Parameters):
    """The parameters of a layer's position scheme."""

    def __init__(
        self, given: AnyPositions, sizes: Sizes, *, dtype: Any = None, rngs: nnx.Rngs
    ) -> None:
        recipe = places.recipe(given)
        recipe.check(sizes)
        self.num_heads = sizes.num_heads
        self.recipe = recipe.bare()
        self._draw(recipe.parameters(sizes), dtype, rngs)

    def turn(self, x: Array, at: Any) -> Array:
        """Queries or keys `[*B, T, N, H]` at positions `at`, None for 0..T-1."""
        return self.recipe.turn(x, at)

    def bias(self) -> Term | None:
        """What is added to the scores; None for nothing."""
        return self.recipe.bias(self.values(), self.num_heads)
