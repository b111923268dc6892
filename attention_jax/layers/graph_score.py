"""The score and mask of graph attention."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import masks, scores
from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array
from attention_jax.layers.arguments import AnyMask, as_mask
from attention_jax.layers.recipes import Draw, ScoreRecipe, Sizes, drawn
from attention_jax.masks import Mask
from attention_jax.scores import Score


@dataclasses.dataclass(frozen=True)
class LeakyRelu:
    """`x` where it is positive, else `slope · x`; equal for equal slopes, unlike a partial."""

    slope: float

    def __call__(self, x: Array) -> Array:
        """The elementwise function."""
        return jax.nn.leaky_relu(x, self.slope)


@dataclasses.dataclass(frozen=True, repr=False)
class GraphScore(ScoreRecipe):
    """The score `v_n · LeakyReLU(q + k)` of projected queries and keys."""

    slope: float = 0.2

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`v [N, A]`, of fan-in A."""
        shape = (sizes.query_depth, sizes.num_heads)
        return {"v": lambda key: drawn(sizes.kernel_init, key, shape, sizes.param_dtype).T}

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.additive` between two identities."""
        v = values["v"]
        same = jnp.eye(v.shape[-1], dtype=v.dtype)
        return scores.additive(same, same, v, activation=LeakyRelu(self.slope))


def neighbours(adjacency: AnyMask, rank: int, self_loops: bool) -> Mask | None:
    """Converts an adjacency matrix to a mask.

    Args:
        adjacency: A mask object; a boolean array `[T, T]`, `[*B, T, T]` or `[*B, #N, T, T]`; or
            None: all nodes are neighbours.
        rank: The number of axes of the nodes `[*B, T, D]`.
        self_loops: Whether every node is a neighbour of itself.

    Raises:
        ValueError: If an array has another rank.
    """
    if adjacency is None:
        return None
    if not isinstance(adjacency, Mask):
        shape = as_array("adjacency", adjacency).shape
        if len(shape) == rank and rank > 2:  # [*B, T, T]: the same for all heads
            adjacency = jnp.asarray(adjacency)[..., None, :, :]
        elif len(shape) not in (2, rank + 1):
            raise ValueError(
                f"adjacency has shape {list(np.shape(adjacency))} but must be [T, T], "
                "[*B, T, T] or [*B, N, T, T]"
            )
    mask = as_mask(adjacency)
    assert mask is not None  # it was given
    return mask | masks.window(0, 0) if self_loops else mask
