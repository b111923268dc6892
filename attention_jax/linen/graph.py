"""Graph attention for Linen."""

from attention_jax.layers import graph
from attention_jax.linen.layer import AttentionLayer


class GraphAttention(graph.GraphAttention, AttentionLayer):
    """Graph attention for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import GraphAttention
        >>> layer, nodes = GraphAttention(5, 3, num_heads=2), jnp.ones((4, 5))
        >>> ring = jnp.roll(jnp.eye(4, dtype=bool), 1, axis=1)
        >>> layer.apply(layer.init(jax.random.key(0), nodes), nodes, ring).shape
        (4, 6)
    """
