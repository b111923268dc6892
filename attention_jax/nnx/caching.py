"""Attention over a cache: each token's keys and values are projected once and kept.

Two ways to keep them. `with_cache` takes a cache and returns the next one, state in and state out;
`decode=True` keeps it in the layer itself, in variables under Flax's names.
"""

from typing import Annotated, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    combine,
)
from attention_jax._modules.caches import check_batch, check_window, unpadded
from attention_jax._modules.flags import Flag
from attention_jax._modules.shield import answered, loud
from attention_jax.cache import KVCache
from attention_jax.nnx.base import AttentionLayer
from attention_jax.nnx.randomness import AnyRngs

# As in `arguments`: what is no shape gets an error made for the reader.
InputShape = Annotated[Any, tuple[int, ...]]
_NAMES = {
    "key": "cached_key",
    "value": "cached_value",
    "index": "cache_index",
    "lost": "cache_lost",
}


class CachedAttention(AttentionLayer):
    """What a multi-head attention does with a cache."""

    decode: bool | None
    in_features: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any
    param_dtype: Any
    out: nnx.LinearGeneral

    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> KVCache:
        """An empty cache for this layer.

        Args:
            batch: `*B`.
            length: How many tokens it can hold.
            dtype: What keys and values are stored in; None is the layer's, or float32 at least.
            rolling: Whether it keeps the latest tokens, for a mask with a window: `length` must be
                at least what a query sees, itself counted. `with_cache` refuses a longer window,
                and a mask without one.

        Returns:
            A cache with index 0.
        """
        return KVCache.init(
            batch,
            length,
            self.num_kv_heads,
            self.head_dim,
            value_depth=self.value_dim,
            dtype=dtype or self.dtype or jnp.promote_types(self.param_dtype, jnp.float32),
            rolling=rolling,
        )

    def with_cache(
        self,
        inputs: QueryInputs,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T out"], KVCache]:
        """Causal self-attention of the next tokens, to those in the cache and to themselves.

        Step t gives row t of the full causal pass, whatever the chunks: a prompt may come whole, in
        several parts, or token by token. A causal mask of the layer's own changes nothing.

        Args:
            inputs: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before.
            valid: bool `[*#B, T]`, which tokens are real; see `KVCache.append`.
            mask: Besides causality: a mask object, or a boolean array whose keys are the slots.
            bias: Added to the scores; the keys of an array are the slots.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where the dropout key comes from; wins over the layer's own stream.

        Returns:
            The output `[*B, T, out_features]`, NaN once a token did not fit, and the next cache.

        Raises:
            ValueError: If shapes do not fit, or the tokens do not and that is known.
        """
        told = {"mask": mask, "bias": bias}
        flags = {"deterministic": deterministic, "rngs": rngs}
        check_batch("inputs", inputs, cache)
        return self._append(inputs, cache, valid, sow_weights=False, **told, **flags)

    def _append(
        self,
        inputs: Any,
        cache: KVCache,
        valid: Any,
        *,
        mask: AnyMask,
        bias: AnyBias,
        sow_weights: bool,
        **flags: Any,
    ) -> tuple[Array, KVCache]:
        """`with_cache`; and the weights, `[*B, N, T, slots]`, sown where they are asked for."""
        T = inputs.shape[-2]
        check_window(cache, combine(self.mask, mask))
        at = cache.next_positions(T, valid)
        query, key, value = self._project(inputs, inputs, inputs, at, at)
        after = cache.append(key, value, valid)
        # In a rolling cache a chunk may overwrite what its own first queries see.
        seen = cache.beside(key, value, valid) if cache.rolling and T > 1 else after
        told = {
            "mask": combine(seen.mask(), masks.causal(), mask),
            "bias": bias,
            "query_positions": at,
            "key_positions": seen.positions(),
            "count": seen.lengths,
        }
        if sow_weights:
            self._sow(self._weights(loud(query, inputs), seen.key, **told))
        result = self._run(query, seen.key, seen.value, **told, **flags)
        return self._leave(result.out, after, inputs), after

    def remember(
        self, inputs_k: KeyInputs, inputs_v: ValueInputs | None = None, *, valid: Any = None
    ) -> KVCache:
        """Keys and values to look at many times, as a decoder looks at its source.

        Args:
            inputs_k: `[*B, S, in_kv_features]`.
            inputs_v: `[*B, S, in_kv_features]`; None is `inputs_k`.
            valid: bool `[*#B, S]`, which of them are real.

        Returns:
            A full cache, for `recall`.
        """
        key, value = self._project_memory(inputs_k, inputs_v)
        *batch, S, _, _ = key.shape
        return self.new_cache(tuple(batch), S, dtype=key.dtype).append(key, value, valid)

    def recall(
        self,
        inputs_q: QueryInputs,
        cache: KVCache,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T out"]:
        """Attention to what is remembered, all of it: the call, with its keys and values at hand.

        Args:
            inputs_q: `[*B, T, in_features]`.
            cache: From `remember`.
            mask: A mask object or boolean array, True where a query may see a key.
            bias: Added to the scores.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where the dropout key comes from; wins over the layer's own stream.
            query_positions: ints `[T]` or `[*B, T]`, 0..T-1 by default.

        Returns:
            `[*B, T, out_features]`.
        """
        check_batch("inputs_q", inputs_q, cache)
        query = self._project_query(inputs_q, query_positions)
        if query_positions is None:
            query_positions = jnp.arange(inputs_q.shape[-2], dtype=jnp.int32)
        result = self._run(
            query,
            cache.key,
            cache.value,
            mask=combine(cache.mask(), mask),
            bias=bias,
            query_positions=query_positions,
            key_positions=cache.positions(),
            deterministic=deterministic,
            rngs=rngs,
        )
        return self._leave(result.out, cache, inputs_q)

    def init_cache(self, input_shape: InputShape, dtype: Any = jnp.float32) -> None:
        """Makes the layer's own cache, or empties it; `decode=True` needs it.

        Args:
            input_shape: `[*B, length, in_features]`: that of the longest input.
            dtype: What keys and values are stored in.

        Raises:
            TypeError: If it is no shape.
            ValueError: If it is not that of an input of this layer.
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
        for field, name in _NAMES.items():
            setattr(self, name, nnx.Cache(getattr(cache, field)))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """What `flax.nnx.view` sets.

        Args:
            deterministic: Whether to leave dropout out.
            decode: Whether calls bring the next tokens only.
            batch_size: `*B` of a new cache, made where there is none yet.
            max_length: Its length.
        """
        super().set_view(deterministic)
        if decode is not None:
            self.decode = decode
        if decode and getattr(self, _NAMES["key"]) is None:
            if batch_size is None or max_length is None:
                raise ValueError(
                    "a view that decodes needs batch_size and max_length for its cache"
                )
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, max_length, self.in_features), self.dtype or jnp.float32)

    def _forget(self) -> None:
        """No cache yet."""
        for name in _NAMES.values():
            setattr(self, name, nnx.data(None))

    def _own_cache(self) -> KVCache:
        if getattr(self, _NAMES["key"]) is None:
            raise ValueError("decode=True needs a cache: call init_cache first")
        kept = {field: getattr(self, name)[...] for field, name in _NAMES.items()}
        # Calls that decode bring real tokens alone, so that Flax's three variables say it all.
        return KVCache(**{**unpadded(kept["key"], kept["value"], kept["index"]), **kept})

    def _keep(self, cache: KVCache) -> None:
        for field, name in _NAMES.items():
            getattr(self, name)[...] = getattr(cache, field)

    def _answer(self, seen: Array, inputs_q: Any) -> Array:
        """The output projection of what the queries saw."""
        return answered(self._project_out(seen), seen, inputs_q)

    def _leave(self, seen: Array, cache: KVCache, inputs_q: Any) -> Array:
        """The output projection; NaN for an example that lost a token, even if it sees nothing."""
        out = self._answer(seen, inputs_q)
        return jnp.where(cache.lost[..., None, None], jnp.nan, out)

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array]:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_query(self, inputs_q: Any, at: Any) -> Array:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_memory(self, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_out(self, out: Array) -> Array:
        raise NotImplementedError(f"{type(self).__name__} has no projections")
