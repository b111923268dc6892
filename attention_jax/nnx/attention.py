"""The attention layers for NNX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import jax.numpy as jnp
from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_flag
from attention_jax.cache import KVCache
from attention_jax.layers import additive, attention, graph, mean, pooling
from attention_jax.layers.body import settings
from attention_jax.layers.caches import unpadded
from attention_jax.layers.construction import Construction
from attention_jax.nnx.layer import DroppingLayer, Layer, module

# Any value is accepted here, because `init_cache` raises a clear error.
InputShape = Annotated[Any, tuple[int, ...]]
Metadata = Mapping[str, Any] | None
_CACHE = {
    "key": "cached_key",
    "value": "cached_value",
    "index": "cache_index",
    "overflowed": "cache_lost",
}


@settings
class _Caching(DroppingLayer):
    """The NNX-specific settings of multi-head attention.

    Args:
        in_features: Width of `inputs_q`.
        qkv_features: D, the width of all heads together, a multiple of N; None is `in_features`.
        out_features: Width of the output; None is `in_features`.
        keep_rngs: Whether the layer keeps a dropout stream; if not, training calls pass `rngs`.
        kernel_metadata: Metadata of every kernel's variable, such as an `out_sharding`.
        out_kernel_metadata: Metadata of the output kernel; None or empty is `kernel_metadata`.
        bias_metadata: Metadata of the biases.
        out_bias_metadata: Metadata of the output bias; None or empty is `bias_metadata`.
        query_ln_scale_metadata: Metadata of the scale of the queries' LayerNorm.
        key_ln_scale_metadata: Metadata of the scale of the keys' LayerNorm.
    """

    _: dataclasses.KW_ONLY
    keep_rngs: bool = True
    kernel_metadata: Metadata = None
    out_kernel_metadata: Metadata = None
    bias_metadata: Metadata = None
    out_bias_metadata: Metadata = None
    query_ln_scale_metadata: Metadata = None
    key_ln_scale_metadata: Metadata = None

    def _check(self, given: Any) -> None:
        super()._check(given)
        for name, value in vars(given).items():
            if name.endswith("_metadata") and not (value is None or isinstance(value, Mapping)):
                raise TypeError(f"{name} must be a mapping or None, got {type(value).__name__}")


@module
class MultiHeadAttention(attention.MultiHeadAttention, _Caching):
    """Multi-head attention for NNX.

    `init_cache` allocates the cache of `decode`. Weights sown outside `flax.nnx.capture` replace
    the method `attention_weights` until `flax.nnx.pop` removes them.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import MultiHeadAttention, additive
        >>> layer = MultiHeadAttention(
        ...     4, 16, score=additive(8), mask=aj.masks.causal(), rngs=nnx.Rngs(0)
        ... )
        >>> x = jnp.ones((2, 7, 16))
        >>> layer(x).shape, layer.attention_weights(x).shape
        ((2, 7, 16), (2, 4, 7, 7))
    """

    in_features: int = dataclasses.field()

    def _build(self, make: Construction) -> None:
        width = self.in_features
        self.qkv_features = self.qkv_features or width
        self.out_features = self.out_features or width
        self.in_kv_features = self.in_kv_features or width
        self.num_kv_heads = self.num_kv_heads or self.num_heads
        (_, self.head_dim), _, (_, self.value_dim) = self._heads(width)
        super()._build(make)
        self._drop_cache()

    def init_cache(self, input_shape: InputShape, dtype: Any = jnp.float32) -> None:
        """Creates or resets the layer's internal cache, which `decode=True` requires.

        Args:
            input_shape: `[*B, length, in_features]`, the shape of the longest input.
            dtype: The storage dtype of keys and values.

        Raises:
            TypeError: If it is not a shape.
            ValueError: If it is not the shape of an input of this layer.
        """
        if not isinstance(input_shape, (tuple, list)):
            raise TypeError(
                f"input_shape must be a shape [*B, length, in_features], got {input_shape!r}"
            )
        if len(input_shape) < 2 or input_shape[-1] != self.in_features:
            raise ValueError(
                f"input_shape must be [*B, length, in_features] with {self.in_features} features "
                f"in its last axis, got {list(input_shape)}"
            )
        *batch, length, _ = input_shape
        cache = self.new_cache(tuple(batch), length, dtype=dtype)
        for field, name in _CACHE.items():
            setattr(self, name, nnx.Cache(getattr(cache, field)))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the attributes of `flax.nnx.view`.

        Args:
            deterministic: Whether to disable dropout.
            decode: Whether inputs are the next tokens only.
            batch_size: `*B` of a new cache, created if there is none yet.
            max_length: The length of the new cache.
        """
        super().set_view(deterministic)
        check_flag("decode", decode)
        if decode is not None:
            self.decode = decode
        if decode and getattr(self, _CACHE["key"]) is None:
            if batch_size is None or max_length is None:
                raise ValueError(
                    "a view that decodes needs batch_size and max_length for its cache"
                )
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, self.in_features), self.dtype or jnp.float32)

    def _drop_cache(self) -> None:
        for name in _CACHE.values():
            setattr(self, name, nnx.data(None))

    def _stored_cache(self) -> KVCache:
        if getattr(self, _CACHE["key"]) is None:
            raise ValueError("decode=True needs a cache: call init_cache first")
        kept = {field: getattr(self, name)[...] for field, name in _CACHE.items()}
        # In decoding calls all tokens are real, so Flax's three variables suffice.
        return KVCache(**{**unpadded(kept["key"], kept["value"], kept["index"]), **kept})

    def _store_cache(self, cache: KVCache) -> None:
        for field, name in _CACHE.items():
            getattr(self, name)[...] = getattr(cache, field)

    def _decode_step(self, inputs: tuple[Any, Any, Any], valid: Any, **options: Any) -> Array:
        if any(x is not inputs[0] for x in inputs):
            raise ValueError(
                "decode=True is self-attention, with keys and values of inputs_q only; for a "
                "constant memory use `new_memory_cache` and `with_memory_cache`"
            )
        if valid is not None:
            raise ValueError("the internal cache holds only real tokens: use with_cache")
        return super()._decode_step(inputs, None, **options)

    def _sow_weights(self, weights: Array) -> None:
        name = "attention_weights"
        if hasattr(self, "__captures__") or name in vars(self):
            self.sow(nnx.Intermediate, name, weights)
        else:  # as in Flax's sow, which would take the method for a sown value
            setattr(self, name, nnx.Intermediate((weights,)))


@module
class AdditiveAttention(additive.AdditiveAttention, DroppingLayer):
    """Additive attention for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))).shape
        (2, 3, 10)
    """


@module
class AttentionPooling(pooling.AttentionPooling, DroppingLayer):
    """Attention pooling for NNX.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AttentionPooling
        >>> pool = AttentionPooling(6, 4, score="gated", rngs=nnx.Rngs(0))
        >>> bags = jnp.ones((2, 5, 6))
        >>> pool(bags, jnp.ones((2, 5), bool)).shape, pool.attention_weights(bags).shape
        ((2, 1, 6), (2, 1, 5))
    """


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


@module
class MeanAttention(mean.MeanAttention, Layer):
    """Uniform average for NNX."""
