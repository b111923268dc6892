"""Additive attention as a layer of its own: one head, no projections but the score's."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
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
from attention_jax._modules.recipes import Sizes
from attention_jax.linen.base import AttentionLayer
from attention_jax.linen.scores import ScoreParameters
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

    Raises:
        ValueError: If a width is not positive or the rate lies outside [0, 1).

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AdditiveAttention
        >>> layer = AdditiveAttention(6, 10, 8)
        >>> query, key = jnp.ones((2, 3, 6)), jnp.ones((2, 5, 10))
        >>> layer.apply(layer.init(jax.random.key(0), query, key), query, key).shape
        (2, 3, 10)

    References:
        Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and
        Translate", arXiv:1409.0473, §3.1 and §A.1.2.
    """

    query_features: int
    key_features: int
    hidden_features: int
    _: dataclasses.KW_ONLY

    def __post_init__(self) -> None:
        for name in ("query_features", "key_features", "hidden_features"):
            check_count(name, getattr(self, name), 1)
        super().__post_init__()

    def setup(self) -> None:
        """The score's parameters."""
        recipe = recipes.Additive(self.hidden_features, shared=True)
        self.score = ScoreParameters(score=recipe, dtype=self.dtype)

    def __call__(
        self,
        query: QueryInputs,
        key: KeyInputs,
        value: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
    ) -> Float[Array, "*B T Dv"]:
        """The weighted mean of the values.

        Args:
            query: `[*B, T, Dq]`.
            key: `[*B, S, Dk]`.
            value: `[*B, S, Dv]`; None is `key`.
            mask: A mask object or boolean array `[*#B, 1, #T, #S]`, True where a query may see.
            bias: Added to the scores: an array `[*#B, 1, #T, #S]` or a bias object.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".

        Returns:
            `[*B, T, Dv]`.

        Raises:
            ValueError: If shapes do not fit, or in training there is no randomness.
            TypeError: If a mask array is not boolean.
        """
        result = self._run(
            *self._one_head(query, key, value),
            score=self._score(),
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
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
        dropout_rng: Any = None,
    ) -> tuple[Float[Array, "*B T Dv"], Stats]:
        """The output, and each row's lse, entropy and largest logit; nothing of size T·S is kept.

        Args:
            query: As in the call; so are the others.
            key: As in the call.
            value: As in the call.
            mask: As in the call.
            bias: As in the call.
            deterministic: As in the call.
            dropout_rng: As in the call.

        Returns:
            The output `[*B, T, Dv]`, and statistics `[*B, 1, T]`, before dropout.
        """
        result = self._run(
            *self._one_head(query, key, value),
            score=self._score(),
            mask=mask,
            bias=bias,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            statistics=True,
        )
        assert result.stats is not None  # asked for above
        return result.out[..., 0, :], result.stats

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
        return self._weights(query, key, score=self._score(), mask=mask, bias=bias)

    def _score(self) -> Any:
        sizes = Sizes(1, self.query_features, self.key_features, self.param_dtype, self.kernel_init)
        return self.score(sizes)

    @nn.nowrap
    def _one_head(self, query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
        check_width("query", query, self.query_features, "[*B, T, query_features]")
        check_width("key", key, self.key_features, "[*B, S, key_features]")
        given = (query, key, key if value is None else value)
        query, key, value = (jnp.asarray(cast(x, self.dtype))[..., None, :] for x in given)
        return query, key, value
