"""Additive attention as a layer: one head, no projections except those of the score."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers import recipes
from attention_jax.layers.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    cast,
    check_width,
)
from attention_jax.layers.attending import AttentionLayer
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.training import Flag
from attention_jax.softmax import Stats


@settings
class AdditiveAttention(AttentionLayer):
    """Additive attention: a network with one hidden layer scores a query and a key.

        e(t, s) = v · tanh(q_t W_query + k_s W_key)
        out_t = Σ_s softmax_s(e(t, s)) · value_s

    The paper calls the query s_{i-1} (the decoder's state), the key h_j (the annotation), W_query
    W_a, W_key U_a. The widths of query, key and value may all differ; values are not projected.

    Args:
        query_features: Dq, width of the queries.
        key_features: Dk, width of the keys.
        hidden_features: A, width of the hidden layer.
        param_dtype: Dtype of the parameters `score.w_query [Dq, A]`, `score.w_key [Dk, A]`,
            `score.v [A]`.
        kernel_init: Initialiser of the parameters.

    Raises:
        ValueError: If a width is not positive or the rate lies outside [0, 1).

    References:
        Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and
        Translate", arXiv:1409.0473, §3.1 and §A.1.2.
    """

    query_features: int
    key_features: int
    hidden_features: int

    _counts = ("query_features", "key_features", "hidden_features")

    def _build(self, make: Construction) -> None:
        make.dropout_stream(self.dropout_rate)
        recipe = recipes.Additive(self.hidden_features, shared=True)
        make.score(recipe, 1, self.query_features, self.key_features)

    def __call__(
        self,
        query: QueryInputs,
        key: KeyInputs,
        value: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> Float[Array, "*B T Dv"]:
        """The weighted mean of the values.

        Args:
            query: `[*B, T, Dq]`.
            key: `[*B, S, Dk]`.
            value: `[*B, S, Dv]`; None is `key`.
            mask: A mask object or boolean array `[*#B, 1, #T, #S]`, True where a query may attend
                to a key.
            bias: Added to the scores: an array `[*#B, 1, #T, #S]` or a bias object.

        Returns:
            `[*B, T, Dv]`.

        Raises:
            ValueError: If shapes do not fit, or in training there is no randomness.
            TypeError: If a mask array is not boolean.
        """
        arrays = self._one_head(query, key, value)
        flags = {"deterministic": deterministic, "random": random}
        return self._run(*arrays, mask=mask, bias=bias, **flags).out[..., 0, :]

    def with_stats(
        self,
        query: QueryInputs,
        key: KeyInputs,
        value: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> tuple[Float[Array, "*B T Dv"], Stats]:
        """The output, and each row's lse, entropy and largest logit, in O(T + S) memory.

        Returns:
            The output `[*B, T, Dv]`, and statistics `[*B, 1, T]`, before dropout.
        """
        arrays = self._one_head(query, key, value)
        flags = {"deterministic": deterministic, "random": random}
        out, stats = self._run_with_stats(*arrays, mask=mask, bias=bias, **flags)
        return out[..., 0, :], stats

    def attention_weights(
        self, query: QueryInputs, key: KeyInputs, *, mask: AnyMask = None, bias: AnyBias = None
    ) -> Float[Array, "*B 1 T S"]:
        """The weights, before dropout: rows sum to 1, or to 0 for a query without visible keys.

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
