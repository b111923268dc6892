"""The attention layers for Linen."""

import flax.linen as nn

from attention_jax._core.axes import Array
from attention_jax.cache import KVCache
from attention_jax.layers import additive, attention, graph, mean, pooling
from attention_jax.layers.caches import unpadded
from attention_jax.linen.layer import AttentionLayer, Layer

_CACHE = {
    "key": "cached_key",
    "value": "cached_value",
    "index": "cache_index",
    "token_positions": "cache_places",
    "lengths": "cache_lengths",
    "overflowed": "cache_lost",
}


class MultiHeadAttention(attention.MultiHeadAttention, AttentionLayer):
    """Multi-head attention for Linen.

    Widths default to those of the inputs. With `decode` keys and values are in the collection
    "cache", and `init` with inputs of the maximum length allocates it.

    Inside `@nn.compact` Flax names a layer after its class: for a checkpoint of Flax's layer, pass
    `name="MultiHeadDotProductAttention_0"`. Masks are boolean:
    `flax.linen.make_causal_mask(..., dtype=bool)`, whose default is float32.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import MultiHeadAttention, additive
        >>> layer = MultiHeadAttention(num_heads=4, score=additive(8), mask=aj.masks.causal())
        >>> x = jnp.ones((2, 7, 16))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> layer.apply(variables, x).shape
        (2, 7, 16)
        >>> layer.apply(variables, x, method=layer.attention_weights).shape
        (2, 4, 7, 7)
    """

    @nn.nowrap
    def _stored_cache(self) -> KVCache | None:
        if not self.has_variable("cache", _CACHE["key"]):
            return None
        found = {
            field: self.get_variable("cache", name)
            for field, name in _CACHE.items()
            if self.has_variable("cache", name)
        }
        # Flax's cache has only keys, values and an index: all of its tokens are real.
        return KVCache(**{**unpadded(found["key"], found["value"], found["index"]), **found})

    @nn.nowrap
    def _store_cache(self, cache: KVCache) -> None:
        for field, name in _CACHE.items():
            self.put_variable("cache", name, getattr(cache, field))

    @nn.nowrap
    def _sow_weights(self, weights: Array) -> None:
        self.sow("intermediates", "attention_weights", weights)


class AdditiveAttention(additive.AdditiveAttention, AttentionLayer):
    """Additive attention for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8)
        >>> query, key = jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))
        >>> layer.apply(layer.init(jax.random.key(0), query, key), query, key).shape
        (2, 3, 10)
    """


class AttentionPooling(pooling.AttentionPooling, AttentionLayer):
    """Attention pooling for Linen.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AttentionPooling
        >>> pool, bags = AttentionPooling(6, 4, score="gated"), jnp.ones((2, 5, 6))
        >>> pool.apply(pool.init(jax.random.key(0), bags), bags, jnp.ones((2, 5), bool)).shape
        (2, 1, 6)
    """


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


class MeanAttention(mean.MeanAttention, Layer):
    """Uniform average for Linen."""
