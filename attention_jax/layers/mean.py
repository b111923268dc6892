"""The uniform average of the visible states, in place of attention."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.observers import owned_by
from attention_jax.attend import attend, attend_with_stats, attention_weights
from attention_jax.cache import KVCache
from attention_jax.layers.arguments import (
    AnyMask,
    KeyInputs,
    QueryInputs,
    check_width,
    combine,
)
from attention_jax.layers.body import LinearSettings, settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.nonfinite import nan_propagating
from attention_jax.layers.recipes import BIAS_INIT, Initializer
from attention_jax.softmax import Stats


@settings
class MeanAttention(LinearSettings):
    """Uniform average of the states visible to a query.

        out_t = W_out · mean_{s: mask(t, s)} (W_value x_s)

    A baseline for `MultiHeadAttention` with the same value and output projections but no query, key
    or score: the difference in a model's quality is due to attention.

    Args:
        in_features: Width of the queries, of which only the length matters, and of the output.
        in_kv_features: Width of the states; None is `in_features`.

    References:
        Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
        Machine Translation", arXiv:1406.1078, §2.2 (one vector for a whole sentence).
    """

    in_features: int
    in_kv_features: int | None = None
    _: dataclasses.KW_ONLY
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None

    _counts = ("in_features", "in_kv_features")

    def _build(self, make: Construction) -> None:
        self.value = make.dense(self.in_kv_features or self.in_features, self.in_features)
        self.out = make.dense(self.in_features, self.in_features)

    def __call__(
        self, inputs_q: QueryInputs, inputs_k: KeyInputs, *, mask: AnyMask = None
    ) -> Float[Array, "*B T Dq"]:
        """The mean of the states visible to each query.

        Args:
            inputs_q: `[*B, T, in_features]`; only its length matters.
            inputs_k: `[*B, S, in_kv_features]`.
            mask: A mask object or boolean array, True where a state is visible to a query.

        Returns:
            `[*B, T, in_features]`; the bias of `out` for a query without visible states.
        """
        arrays = self._zero_scores(inputs_q, inputs_k)
        with owned_by(self):
            mean = attend(*arrays, **self._options(mask))
        return self.out(mean[..., 0, :])

    def with_stats(
        self, inputs_q: QueryInputs, inputs_k: KeyInputs, *, mask: AnyMask = None
    ) -> tuple[Float[Array, "*B T Dq"], Stats]:
        """The output and statistics `[*B, 1, T]`; the entropy is ln(number of visible states)."""
        arrays = self._zero_scores(inputs_q, inputs_k)
        with owned_by(self):
            out, stats = attend_with_stats(*arrays, **self._options(mask))
        return self.out(out[..., 0, :]), stats

    def attention_weights(
        self, inputs_q: QueryInputs, inputs_k: KeyInputs, *, mask: AnyMask = None
    ) -> Float[Array, "*B 1 T S"]:
        """The weights, 1 / (number of visible states)."""
        query, key, _ = self._zero_scores(inputs_q, inputs_k)
        return attention_weights(query, key, mask=combine(mask), precision=self.precision)

    def new_memory_cache(self, inputs_k: KeyInputs, *, valid: Any = None) -> KVCache:
        """The projected states, for `with_memory_cache`; as `MultiHeadAttention.new_memory_cache`.

        Args:
            valid: bool `[*#B, S]`, which of the states are real.
        """
        _, key, value = self._zero_scores(None, inputs_k)
        *batch, S, _, depth = value.shape
        cache = KVCache.init(tuple(batch), S, 1, 1, value_depth=depth, dtype=value.dtype)
        return cache.append(key, value, valid)

    def with_memory_cache(
        self, inputs_q: QueryInputs, cache: KVCache, *, mask: AnyMask = None
    ) -> Float[Array, "*B T Dq"]:
        """The mean of the states in a cache.

        Args:
            cache: From `new_memory_cache`.
        """
        query = jnp.zeros((*inputs_q.shape[:-1], 1, 1), cache.value.dtype)
        options = self._options(combine(cache.mask(), mask))
        with owned_by(self):
            mean = attend(query, cache.key, cache.value, **options)
        return self.out(mean[..., 0, :])

    def _zero_scores(self, inputs_q: Any, inputs_k: Any) -> tuple[Array, Array, Array]:
        """Zero queries and keys, so that every score is 0, and the projected states."""
        states = self.in_kv_features or self.in_features
        check_width("inputs_k", inputs_k, states, "[*B, S, in_kv_features]")
        if inputs_q is not None:
            check_width("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]")
        value = nan_propagating(self.value, inputs_k)
        shape = (inputs_k if inputs_q is None else inputs_q).shape
        query = jnp.zeros((*shape[:-1], 1, 1), value.dtype)
        key = jnp.zeros((*inputs_k.shape[:-1], 1, 1), value.dtype)
        return query, key, value[..., None, :]

    def _options(self, mask: AnyMask) -> dict[str, Any]:
        how = {"implementation": self.implementation, "block_size": self.block_size}
        return {"mask": combine(mask), "precision": self.precision, **how}
