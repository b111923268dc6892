"""Attention over a cache: each token's keys and values are projected once and kept.

`with_cache` takes a cache and returns the updated one; with `decode=True` the layer stores the
cache in variables with Flax's names.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax.cache import KVCache
from attention_jax.layers.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    combine,
)
from attention_jax.layers.caches import check_batch, check_window
from attention_jax.layers.nonfinite import propagate_nan, propagate_nan_of_queries
from attention_jax.layers.projected_attention import ProjectedAttention
from attention_jax.layers.training import Flag


class CachedAttention(ProjectedAttention):
    """A projected attention over a cache."""

    def with_cache(
        self,
        inputs: QueryInputs,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T out"], KVCache]:
        """Causal self-attention of the next tokens to the cached ones and to themselves.

        Row t equals row t of the full causal pass for any chunking: a prompt may be passed whole,
        in several parts, or token by token. A causal mask of the layer has no effect.

        Args:
            inputs: `[*B, T, in_features]`, of the T next tokens.
            cache: The previous tokens, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real; see `KVCache.append`.
            mask: Combined with causality: a mask object, or a boolean array whose keys are the
                slots of a cache that is not rolling.
            bias: Added to the scores; the keys of an array are the cache's slots.

        Returns:
            The output `[*B, T, out_features]`, NaN after an overflow, and the updated cache.

        Raises:
            ValueError: If shapes do not fit, or an overflow is known while tracing.
        """
        check_batch("inputs", inputs, cache)
        options = {"mask": mask, "bias": bias, "sow_weights": False}
        options |= {"deterministic": deterministic, "random": random}
        return self._append((inputs, inputs, inputs), cache, valid, **options)

    def _append(
        self,
        inputs: tuple[Any, Any, Any],
        cache: KVCache,
        valid: Any,
        *,
        mask: AnyMask,
        bias: AnyBias,
        sow_weights: bool,
        **flags: Any,
    ) -> tuple[Array, KVCache]:
        """`with_cache` with separate inputs of queries, keys and values."""
        T, S = inputs[0].shape[-2], inputs[1].shape[-2]
        if T != S:
            raise ValueError(f"a cache takes a key for each query: inputs_q has {T}, inputs_k {S}")
        check_window(cache, combine(self.mask, mask))
        at = cache.next_positions(T, valid)
        query, key, value = self._project(*inputs, at, at)
        after = cache.append(key, value, valid)
        # In a rolling cache a chunk may overwrite keys that its first queries attend to.
        keys = cache.concatenate(key, value, valid) if cache.rolling and T > 1 else after
        call_options = {
            "mask": combine(keys.mask(), masks.causal(), mask),
            "bias": bias,
            "query_positions": at,
            "key_positions": keys.positions(),
            "count": keys.lengths,
        }
        if sow_weights:
            self._sow_weights(
                self._weights(propagate_nan(query, inputs[0]), keys.key, **call_options)
            )
        result = self._run(query, keys.key, keys.value, **call_options, **flags)
        return self._output_or_nan(result.out, after, inputs[0]), after

    def _decode_step(self, inputs: tuple[Any, Any, Any], valid: Any, **options: Any) -> Array:
        """Attention of the next tokens over the layer's internal cache."""
        cache = self._stored_cache()
        if cache is None:  # the call allocates room for its tokens, and stores none
            _, key, value = self._project(*inputs, None, None)
            cache = empty_cache(key, value)
            out, _ = self._append(inputs, cache, valid, **options)
        else:
            check_batch("inputs_q", inputs[0], cache)
            out, cache = self._append(inputs, cache, valid, **options)
        self._store_cache(cache)
        return out

    def new_memory_cache(
        self, inputs_k: KeyInputs, inputs_v: ValueInputs | None = None, *, valid: Any = None
    ) -> KVCache:
        """The projected keys and values of a memory, for `with_memory_cache`.

        Args:
            inputs_k: `[*B, S, in_kv_features]`.
            inputs_v: `[*B, S, in_kv_features]`; None is `inputs_k`.
            valid: bool `[*#B, S]`, which inputs are real.

        Returns:
            A full cache.
        """
        key, value = self._project_memory(inputs_k, inputs_v)
        return empty_cache(key, value).append(key, value, valid)

    def with_memory_cache(
        self,
        inputs_q: QueryInputs,
        cache: KVCache,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        query_positions: Any = None,
        **random: Any,
    ) -> Float[Array, "*B T out"]:
        """Attention to the projected keys and values of a memory.

        Args:
            cache: From `new_memory_cache`.

        Returns:
            `[*B, T, out_features]`.
        """
        check_batch("inputs_q", inputs_q, cache)
        query = self._project_query(inputs_q, query_positions)
        if query_positions is None:
            query_positions = jnp.arange(inputs_q.shape[-2], dtype=jnp.int32)
        call_options = {"query_positions": query_positions, "key_positions": cache.positions()}
        call_options |= {"mask": combine(cache.mask(), mask), "bias": bias}
        flags = {"deterministic": deterministic, "random": random}
        result = self._run(query, cache.key, cache.value, **call_options, **flags)
        return self._output_or_nan(result.out, cache, inputs_q)

    def _project_output(self, attended: Array, inputs_q: Any) -> Array:
        """The output projection of the attended values."""
        return propagate_nan_of_queries(
            self._project_out(attended, inputs_q.shape[-1]), attended, inputs_q
        )

    def _output_or_nan(self, attended: Array, cache: KVCache, inputs_q: Any) -> Array:
        """`_project_output`; NaN for an example whose cache overflowed."""
        out = self._project_output(attended, inputs_q)
        return jnp.where(cache.overflowed[..., None, None], jnp.nan, out)


def empty_cache(key: Array, value: Array) -> KVCache:
    """An empty cache with the length of keys `[*B, S, K, H]` and values."""
    *batch, length, heads, depth = key.shape
    options = {"dtype": key.dtype, "value_depth": value.shape[-1]}
    return KVCache.init(tuple(batch), length, heads, depth, **options)
