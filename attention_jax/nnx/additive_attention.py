"""Additive attention as a layer of its own: one head, no projections but the score's."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules import recipes
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    cast,
    check_width,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import KERNEL_INIT, Initializer, Sizes
from attention_jax._modules.settings import check_settings
from attention_jax.nnx.base import AttentionLayer
from attention_jax.nnx.randomness import AnyRngs, check_rngs
from attention_jax.nnx.scores import ScoreParameters
from attention_jax.softmax import Stats


class AdditiveAttention(AttentionLayer):
    """Additive attention: a small network says how well a query and a key match.

        e(t, s) = v · tanh(q_t W_query + k_s W_key)
        out_t = Σ_s softmax_s(e(t, s)) · value_s

    The paper calls the query s_{i-1} (the decoder's state), the key h_j (the annotation), W_query
    W_a, W_key U_a. The widths of query, key and value may all differ; values are not projected.

    Args:
        query_features: Dq, width of the queries.
        key_features: Dk, width of the keys.
        hidden_features: A, width of the hidden layer.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters `score.w_query [Dq, A]`, `score.w_key [Dk, A]`,
            `score.v [A]`.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the parameters.
        mask: A mask object or boolean array that holds in every call.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
        rngs: Streams for the parameters and, with a rate, "dropout".

    Raises:
        ValueError: If a width is not positive or the rate lies outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))).shape
        (2, 3, 10)

    References:
        Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and
        Translate", arXiv:1409.0473, §3.1 and §A.1.2.
    """

    def __init__(
        self,
        query_features: int,
        key_features: int,
        hidden_features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        dropout_rate: float | int = 0.0,
        deterministic: Flag = None,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        mask: AnyMask = None,
        implementation: str | tuple[str, ...] | None = None,
        block_size: int | tuple[int, int] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_rngs(type(self).__name__, rngs)
        check_settings(dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init)
        self.query_features = check_count("query_features", query_features, 1)
        self.key_features = check_count("key_features", key_features, 1)
        self.hidden_features = check_count("hidden_features", hidden_features, 1)
        self.dtype = dtype
        sizes = Sizes(1, query_features, key_features, param_dtype, kernel_init)
        recipe = recipes.Additive(hidden_features, shared=True)
        self._settle(
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            implementation=implementation,
            block_size=block_size,
            rngs=rngs,
        )
        self.score = ScoreParameters(recipe, sizes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        query: QueryInputs,
        key: KeyInputs,
        value: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> Float[Array, "*B T Dv"]:
        """The weighted mean of the values.

        Args:
            query: `[*B, T, Dq]`.
            key: `[*B, S, Dk]`.
            value: `[*B, S, Dv]`; None is `key`.
            mask: A mask object or boolean array `[*#B, 1, #T, #S]`, True where a query may see.
            bias: Added to the scores: an array `[*#B, 1, #T, #S]` or a bias object.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where the dropout key comes from; wins over the layer's own stream.

        Returns:
            `[*B, T, Dv]`.

        Raises:
            ValueError: If shapes do not fit, or in training there is no randomness.
            TypeError: If a mask array is not boolean.
        """
        result = self._run(
            *self._one_head(query, key, value),
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            rngs=rngs,
        )
        return result.out[..., 0, :]

    def with_stats(
        self,
        query: QueryInputs,
        key: KeyInputs,
        value: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T Dv"], Stats]:
        """The output, and each row's lse, entropy and largest logit; nothing of size T·S is kept.

        Args:
            query: As in the call; so are the others.
            key: As in the call.
            value: As in the call.
            mask: As in the call.
            bias: As in the call.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            The output `[*B, T, Dv]`, and statistics `[*B, 1, T]`, before dropout.
        """
        out, stats = self._run_with_stats(
            *self._one_head(query, key, value),
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            rngs=rngs,
        )
        return out[..., 0, :], stats

    def attention_weights(
        self,
        query: QueryInputs,
        key: KeyInputs,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
    ) -> Float[Array, "*B 1 T S"]:
        """The weights, before dropout: rows sum to 1, or to 0 where a query may see nothing.

        Args:
            query: As in the call; so are the others.
            key: As in the call.
            mask: As in the call.
            bias: As in the call.

        Returns:
            `[*B, 1, T, S]`.
        """
        query, key, _ = self._one_head(query, key, None)
        return self._weights(query, key, mask=mask, bias=bias)

    def _one_head(self, query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
        check_width("query", query, self.query_features, "[*B, T, query_features]")
        check_width("key", key, self.key_features, "[*B, S, key_features]")
        given = (query, key, key if value is None else value)
        query, key, value = (jnp.asarray(cast(x, self.dtype))[..., None, :] for x in given)
        return query, key, value
