"""The Transformer encoder layer."""

from typing import Any

from jaxtyping import Float

from attention_jax._core.axes import Array, Batch
from attention_jax.cache import KVCache
from attention_jax.layers.arguments import AnyMask, Features, Memory, check_width
from attention_jax.layers.body import settings
from attention_jax.layers.caches import check_batch
from attention_jax.layers.training import Flag
from attention_jax.layers.transformer_layer import TransformerLayer


@settings
class TransformerEncoderLayer(TransformerLayer):
    """Self-attention and a feed-forward network, each with a residual connection and a LayerNorm.

        post-norm:  x = LayerNorm(x + attention(x));   x = LayerNorm(x + mlp(x))
        pre-norm:   x = x + attention(LayerNorm(x));   x = x + mlp(LayerNorm(x))

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
        Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture",
        arXiv:2002.04745, Table 1 (post-norm and pre-norm).
    """

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        valid: Any = None,
        query_positions: Any = None,
        **random: Any,
    ) -> Float[Array, "*B S D"]:
        """Applies the layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may attend
                to a key.

        Returns:
            `[*B, S, in_features]`.
        """
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        flags = (deterministic, random)
        call_options = {"mask": mask, "valid": valid, "query_positions": query_positions}
        x, _ = self._attend_to_self(self._cast(x), *flags, **call_options)
        return self._feed_forward(x, *flags)

    def new_cache(
        self, batch: Batch, length: int, *, dtype: Any = None, rolling: bool = False
    ) -> KVCache:
        """An empty cache for `with_cache`.

        Args:
            batch: `*B`.
            length: The number of tokens that it can hold.
            dtype: The storage dtype of keys and values; None is the layer's, or float32.
            rolling: Whether it keeps only the latest tokens, as in `MultiHeadAttention.new_cache`.
        """
        attention = self._unbound("self_attention", self._build_self_attention)
        return attention.new_cache(batch, length, dtype=dtype, rolling=rolling)

    def with_cache(
        self,
        x: Features,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T D"], KVCache]:
        """Applies the layer causally to the next tokens: a layer of a decoder-only model.

        Args:
            x: `[*B, T, in_features]`, of the T next tokens.
            cache: The previous tokens, from `new_cache`.
            mask: Besides causality; the keys of an array are the cache's slots.

        Returns:
            `[*B, T, in_features]` and the updated cache.
        """
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        check_batch("x", x, cache)
        flags = (deterministic, random)
        call_options = {"cache": cache, "valid": valid, "mask": mask}
        x, after = self._attend_to_self(self._cast(x), *flags, **call_options)
        return self._feed_forward(x, *flags), after
