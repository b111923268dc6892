"""Attention over a cache: each token's keys and values are projected once and kept.

Two ways to keep them. `with_cache` takes a cache and returns the next one, state in and state out;
`decode=True` keeps it in the collection "cache", under Flax's names.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
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
from attention_jax.linen.base import AttentionLayer
from attention_jax.scores import Score

_NAMES = {
    "key": "cached_key",
    "value": "cached_value",
    "index": "cache_index",
    "places": "cache_places",
    "lengths": "cache_lengths",
    "lost": "cache_lost",
}


def stored_cache(module: nn.Module) -> KVCache | None:
    """The cache in the module's collection "cache"; None where there is none.

    Flax's own has keys, values and an index alone: its tokens are all real, and none was lost.
    """
    if not module.has_variable("cache", _NAMES["key"]):
        return None
    names = [name for name in _NAMES if module.has_variable("cache", _NAMES[name])]
    found = {name: module.get_variable("cache", _NAMES[name]) for name in names}
    return KVCache(**{**unpadded(found["key"], found["value"], found["index"]), **found})


def store_cache(module: nn.Module, cache: KVCache) -> None:
    """Puts the cache into the module's collection "cache", which must be mutable."""
    for field, name in _NAMES.items():
        module.put_variable("cache", name, getattr(cache, field))


class CachedAttention(AttentionLayer):
    """What a multi-head attention does with a cache."""

    def with_cache(
        self,
        inputs: QueryInputs,
        cache: KVCache,
        *,
        valid: Any = None,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
    ) -> tuple[Float[Array, "*B T out"], KVCache]:
        """Causal self-attention of the next tokens, to those in the cache and to themselves.

        Step t gives row t of the full causal pass, whatever the chunks: a prompt may come whole, in
        several parts, or token by token. A causal mask of the layer's own changes nothing.

        Args:
            inputs: `[*B, T, in_features]`, of the T next tokens.
            cache: The tokens before; `KVCache.init` makes an empty one.
            valid: bool `[*#B, T]`, which tokens are real; see `KVCache.append`.
            mask: Besides causality: a mask object, or a boolean array whose keys are the slots.
            bias: Added to the scores; the keys of an array are the slots.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".

        Returns:
            The output `[*B, T, out_features]`, NaN once a token did not fit, and the next cache.

        Raises:
            ValueError: If shapes do not fit, or the tokens do not and that is known.
        """
        options = {"mask": mask, "bias": bias, "deterministic": deterministic}
        options |= {"dropout_rng": dropout_rng, "sow_weights": False}
        check_batch("inputs", inputs, cache)
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
        """`with_cache`, with keys and values of inputs of their own, as Flax's decoding has it.

        The weights, `[*B, N, T, slots]`, are sown where they are asked for.
        """
        T, S = inputs[0].shape[-2], inputs[1].shape[-2]
        if T != S:
            raise ValueError(f"a cache takes a key for each query: inputs_q has {T}, inputs_k {S}")
        check_window(cache, combine(self.mask, mask))
        at = cache.next_positions(T, valid)
        query, key, value, score = self._project(*inputs, at, at)
        after = cache.append(key, value, valid)
        # In a rolling cache a chunk may overwrite what its own first queries see.
        seen = cache.beside(key, value, valid) if cache.rolling and T > 1 else after
        told = {
            "score": score,
            "mask": combine(seen.mask(), masks.causal(), mask),
            "bias": bias,
            "query_positions": at,
            "key_positions": seen.positions(),
            "count": seen.lengths,
        }
        if sow_weights:
            weights = self._weights(loud(query, inputs[0]), seen.key, **told)
            self.sow("intermediates", "attention_weights", weights)
        flags |= {"shared_dropout": self._shared_dropout()}
        result = self._run(query, seen.key, seen.value, **told, **flags)
        return self._leave(result.out, after, inputs[0]), after

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
        *batch, S, heads, depth = key.shape
        cache = KVCache.init(
            tuple(batch), S, heads, depth, dtype=key.dtype, value_depth=value.shape[-1]
        )
        return cache.append(key, value, valid)

    def recall(
        self,
        inputs_q: QueryInputs,
        cache: KVCache,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T out"]:
        """Attention to what is remembered, all of it: the call, with its keys and values at hand.

        Args:
            inputs_q: `[*B, T, in_features]`.
            cache: From `remember`.
            mask: A mask object or boolean array, True where a query may see a key.
            bias: Added to the scores.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".
            query_positions: ints `[T]` or `[*B, T]`, 0..T-1 by default.

        Returns:
            `[*B, T, out_features]`.
        """
        check_batch("inputs_q", inputs_q, cache)
        query, score = self._project_query(inputs_q, query_positions)
        if query_positions is None:
            query_positions = jnp.arange(inputs_q.shape[-2], dtype=jnp.int32)
        result = self._run(
            query,
            cache.key,
            cache.value,
            score=score,
            mask=combine(cache.mask(), mask),
            bias=bias,
            query_positions=query_positions,
            key_positions=cache.positions(),
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            shared_dropout=self._shared_dropout(),
        )
        return self._leave(result.out, cache, inputs_q)

    @nn.nowrap
    def _answer(self, seen: Array, inputs_q: Any) -> Array:
        """The output projection of what the queries saw."""
        return answered(self._project_out(seen, inputs_q.shape[-1]), seen, inputs_q)

    @nn.nowrap
    def _leave(self, seen: Array, cache: KVCache, inputs_q: Any) -> Array:
        """The output projection; NaN for an example that lost a token, even if it sees nothing."""
        out = self._answer(seen, inputs_q)
        return jnp.where(cache.lost[..., None, None], jnp.nan, out)

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array, Score]:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_query(self, inputs_q: Any, at: Any) -> tuple[Array, Score]:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_memory(self, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _project_out(self, out: Array, width: int) -> Array:
        raise NotImplementedError(f"{type(self).__name__} has no projections")

    def _shared_dropout(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} has no dropout of its own")
