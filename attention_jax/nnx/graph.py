"""Graph attention for NNX."""

from attention_jax.layers import graph
from attention_jax.nnx.layer import DroppingLayer, module


@module
class GraphAttention(graph.GraphAttention, DroppingLayer):
    """Graph attention for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import GraphAttention
        >>> layer = GraphAttention(5, 3, num_heads=2, rngs=nnx.Rngs(0))
        >>> ring = jnp.roll(jnp.eye(4, dtype=bool), 1, axis=1)
        >>> layer(jnp.ones((4, 5)), ring).shape
        (4, 6)
    """
