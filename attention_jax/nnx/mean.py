"""Attention's null hypothesis: everything that may be seen, weighed alike."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.observe import owned_by
from attention_jax._modules.arguments import (
    AnyMask,
    KeyInputs,
    QueryInputs,
    as_mask,
    check_width,
    combine,
)
from attention_jax._modules.recipes import BIAS_INIT, KERNEL_INIT, Initializer
from attention_jax._modules.settings import check_settings
from attention_jax._modules.shield import shielded
from attention_jax.attend import attend, attend_with_stats, attention_weights
from attention_jax.cache import KVCache
from attention_jax.nnx.randomness import check_rngs
from attention_jax.softmax import Stats


class MeanAttention(nnx.Module):
    """The mean of the states a query may see: attention that does not look.

        out_t = W_out · mean_{s: mask(t, s)} (W_value x_s)

    It stands where `MultiHeadAttention` stands, projections of value and output included, and has
    no query, no key and no score: what a model loses with it is what attention was worth.

    Args:
        in_features: Width of the queries, which only say how many outputs there are, and of the
            output.
        in_kv_features: Width of the states; None is `in_features`.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels.
        bias_init: Initialiser of the biases.
        use_bias: Whether the projections have biases.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
        rngs: A stream for the parameters.

    References:
        Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
        Machine Translation", arXiv:1406.1078, §2.2 (one vector for a whole sentence).
    """

    def __init__(
        self,
        in_features: int,
        in_kv_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        use_bias: bool = True,
        implementation: str | tuple[str, ...] | None = None,
        block_size: int | tuple[int, int] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_rngs(type(self).__name__, rngs)
        self.in_features = check_count("in_features", in_features, 1)
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        check_count("in_kv_features", self.in_kv_features, 1)
        self.precision = precision
        self.implementation = implementation
        self.block_size = block_size
        options = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        check_settings(implementation=implementation, block_size=block_size, **options)
        self.value = nnx.Linear(self.in_kv_features, in_features, **options)
        self.out = nnx.Linear(in_features, in_features, **options)

    def __call__(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs,
        *,
        mask: AnyMask = None,
    ) -> Float[Array, "*B T Dq"]:
        """The mean of the states that each query may see.

        Args:
            inputs_q: `[*B, T, in_features]`; only its length matters.
            inputs_k: `[*B, S, in_kv_features]`.
            mask: A mask object or boolean array, True where a query may see a state.

        Returns:
            `[*B, T, in_features]`; `out`'s bias where a query may see nothing.
        """
        level = self._level(inputs_q, inputs_k)
        with owned_by(self):
            mean = attend(*level, **self._options(mask))
        return self.out(mean[..., 0, :])

    def with_stats(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs,
        *,
        mask: AnyMask = None,
    ) -> tuple[Float[Array, "*B T Dq"], Stats]:
        """The output, and statistics `[*B, 1, T]`: the entropy is ln of the number of states seen.

        Args:
            inputs_q: As in the call; so are the others.
            inputs_k: As in the call.
            mask: As in the call.
        """
        level = self._level(inputs_q, inputs_k)
        with owned_by(self):
            out, stats = attend_with_stats(*level, **self._options(mask))
        return self.out(out[..., 0, :]), stats

    def attention_weights(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs,
        *,
        mask: AnyMask = None,
    ) -> Float[Array, "*B 1 T S"]:
        """The weights: one over the number of states seen.

        Args:
            inputs_q: As in the call; so are the others.
            inputs_k: As in the call.
            mask: As in the call.
        """
        query, key, _ = self._level(inputs_q, inputs_k)
        options = self._options(mask)
        return attention_weights(query, key, mask=options["mask"], precision=self.precision)

    def remember(self, inputs_k: KeyInputs, *, valid: Any = None) -> KVCache:
        """The states, projected once to be averaged many times, as `MultiHeadAttention.remember`.

        Args:
            inputs_k: `[*B, S, in_kv_features]`.
            valid: bool `[*#B, S]`, which of them are real.
        """
        empty = jnp.zeros((*inputs_k.shape[:-2], 0, self.in_features))
        _, key, value = self._level(empty, inputs_k)
        *batch, S, _, depth = value.shape
        cache = KVCache.init(tuple(batch), S, 1, 1, value_depth=depth, dtype=value.dtype)
        return cache.append(key, value, valid)

    def recall(
        self, inputs_q: QueryInputs, cache: KVCache, *, mask: AnyMask = None
    ) -> Float[Array, "*B T Dq"]:
        """The mean of what is remembered.

        Args:
            inputs_q: `[*B, T, in_features]`; only its length matters.
            cache: From `remember`.
            mask: As in the call.
        """
        query = jnp.zeros((*inputs_q.shape[:-1], 1, 1), cache.value.dtype)
        options = self._options(combine(cache.mask(), mask))
        with owned_by(self):
            mean = attend(query, cache.key, cache.value, **options)
        return self.out(mean[..., 0, :])

    def _level(self, inputs_q: Any, inputs_k: Any) -> tuple[Array, Array, Array]:
        """Queries and keys that are all zero: every score is equal, whatever the inputs."""
        check_width("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]")
        check_width("inputs_k", inputs_k, self.in_kv_features, "[*B, S, in_kv_features]")
        value = shielded(self.value, inputs_k)
        query = jnp.zeros((*inputs_q.shape[:-1], 1, 1), value.dtype)
        key = jnp.zeros((*inputs_k.shape[:-1], 1, 1), value.dtype)
        return query, key, value[..., None, :]

    def _options(self, mask: AnyMask) -> dict[str, Any]:
        return {
            "mask": as_mask(mask),
            "implementation": self.implementation,
            "block_size": self.block_size,
            "precision": self.precision,
        }
