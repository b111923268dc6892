"""Multi-head attention with any score, any mask and the engine's memory, under Flax's names."""

from typing import Any

import flax.linen as nn
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
from attention_jax._modules.caches import check_batch
from attention_jax._modules.flags import Flag
from attention_jax._modules.shield import loud, loud_rows
from attention_jax.cache import KVCache
from attention_jax.linen.caching import store_cache, stored_cache
from attention_jax.linen.heads import ProjectedAttention
from attention_jax.softmax import Stats


class MultiHeadAttention(ProjectedAttention):
    """Multi-head attention: N attentions side by side, each on its own projections.

        out = Σ_n  attend(x_q W_n^query, x_k W_n^key, x_v W_n^value) W_n^out

    Names, shapes and initialisation are those of `flax.linen.MultiHeadDotProductAttention`: a
    checkpoint of either loads into the other, and outputs are equal. It differs in what it adds,
    and in three promises: a query that may see nothing gets 0, masked keys and values do not matter
    even when they are NaN, and dropout is independent for each batch entry and head unless asked
    otherwise. Where the constructor and the call both give `deterministic`, the call's holds.

    Two things to mind with a model that is there already. Inside `@nn.compact` Flax names a layer
    after its class: where a checkpoint is of Flax's, say `name="MultiHeadDotProductAttention_0"`.
    And masks are boolean: `flax.linen.make_causal_mask(..., dtype=bool)`, which gives float32 by
    default.

    Args:
        num_heads: N, the number of query heads.
        in_features: Width of `inputs_q`; None takes what comes.
        qkv_features: D, the width that the heads share, a multiple of N; None is that of
            `inputs_q`.
        out_features: Width of the output; None is that of `inputs_q`.
        num_kv_heads: K, the number of key/value heads, of which N is a multiple; None is N. Query
            head n uses key/value head n // (N // K).
        in_kv_features: Width of `inputs_k` and `inputs_v`; None is `in_features`, or what comes.
        broadcast_dropout: One dropout mask `[T, S]` for all batch entries and heads.
        out_kernel_init: Initialiser of the output kernel; None is `kernel_init`.
        bias_init: Initialiser of the biases.
        out_bias_init: That of the output bias; None is `bias_init`.
        use_bias: Whether the projections have biases.
        decode: Whether calls bring the next tokens only, one or several, and keys and values are
            kept in the collection "cache", as in Flax; `init` with inputs of the greatest length
            makes room. See `with_cache` for state in, state out.
        normalize_qk: Whether queries and keys go through a LayerNorm each, without bias.
        score: A score object, whose float arrays train from then on; a recipe such as
            `attention_jax.linen.additive(32)`; a name ("dot", "scaled_dot", "general", "additive",
            "concat", "cosine"); a function `(num_heads, head_dim, key) -> Score`; None is the
            scaled dot product.
        positions: A position scheme: a recipe such as `attention_jax.linen.rotary()`, a name
            ("rotary", "alibi", "relative_bias", "shaw"), or a bias object, whose float arrays train
            from then on; None is none.
        value_features: The width that the values of N heads have, a multiple of N; None is
            `qkv_features`.
        fused_qkv: Whether self-attention makes queries, keys and values in one matrix product. The
            parameters are the same, and so are the numbers. Projections that were replaced, as by
            an adapter or a quantised layer, are called one by one.
        force_fp32_for_softmax: Whether weights, sown or returned, are float32 at least, not of the
            queries' dtype. The softmax is in any case.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`, for every matrix product.
        kernel_init: Initialiser of the kernels, and of the score's.
        mask: A mask object or boolean array that holds in every call.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Raises:
        ValueError: If a width is no multiple of the heads, or N of K, a rate lies outside [0, 1),
            or a score's name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import MultiHeadAttention, additive
        >>> layer = MultiHeadAttention(num_heads=4, score=additive(8), mask=aj.masks.causal())
        >>> x = jnp.ones((2, 7, 16))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> layer.apply(variables, x).shape
        (2, 7, 16)
        >>> layer.apply(variables, x, method=layer.attention_weights).shape
        (2, 4, 7, 7)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.2.
        Ainslie et al. 2023, "GQA", arXiv:2305.13245, §2.2 (`num_kv_heads`).
        Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters",
        arXiv:2302.05442, §2.1 (`normalize_qk`).
    """

    def __call__(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        inputs_v: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        query_positions: Any = None,
        key_positions: Any = None,
        is_causal: bool = False,
        valid: Any = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*B T out"]:
        """The attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
            inputs_q: `[*B, T, in_features]`.
            inputs_k: `[*B, S, in_kv_features]`; None is `inputs_q`.
            inputs_v: `[*B, S, in_kv_features]`; None is `inputs_k`.
            mask: A mask object or boolean array, True where a query may see a key; both this one
                and the layer's own must allow a pair. In a decoding step its keys are the cache's
                slots.
            bias: Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.
            query_positions: ints `[T]` or `[*B, T]`, 0..T-1 by default.
            key_positions: ints `[S]` or `[*B, S]`; by default those of the queries where the keys
                are made of the same inputs, else 0..S-1.
            is_causal: Whether a query sees keys up to its own position only.
            valid: bool `[*#B, T]`, in a decoding step: which of its tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".
            sow_weights: Whether to put the weights, before dropout, into the collection
                "intermediates" as "attention_weights"; that takes O(T·S) memory. As in Flax a
                decoding step's are over the cache's slots, 0 for those not written yet.

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError: If shapes do not fit, in training there is no randomness, or the cache is
                full.
            TypeError: If a mask array is not boolean.
        """
        flags = {"deterministic": deterministic, "dropout_rng": dropout_rng}
        if self.decode:
            if query_positions is not None or key_positions is not None:
                raise ValueError("decode=True takes positions from the cache: give none")
            inputs = self._three(inputs_q, inputs_k, inputs_v)
            told = {"mask": mask, "bias": bias, "sow_weights": sow_weights}
            return self._step(inputs, valid, **told, **flags)
        if valid is not None:
            raise ValueError("valid is for decode=True; hide tokens from all by a mask")
        arrays, told = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        told |= {"mask": combine(masks.causal() if is_causal else None, mask), "bias": bias}
        if sow_weights:
            weights = self._weights(loud(arrays[0], inputs_q), arrays[1], **told)
            self.sow("intermediates", "attention_weights", weights)
        told |= {"shared_dropout": self.broadcast_dropout, "adapt": self._adapt(inputs_q)}
        result = self._run(*arrays, **told, **flags)
        return self._answer(result.out, inputs_q)

    def with_stats(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        inputs_v: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        query_positions: Any = None,
        key_positions: Any = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
    ) -> tuple[Float[Array, "*B T out"], Stats]:
        """The output, and each row's lse, entropy and largest logit; nothing of size T·S is kept.

        Args:
            inputs_q: As in the call; so are the others.
            inputs_k: As in the call.
            inputs_v: As in the call.
            mask: As in the call.
            bias: As in the call.
            query_positions: As in the call.
            key_positions: As in the call.
            deterministic: As in the call.
            dropout_rng: As in the call.

        Returns:
            The output `[*B, T, out_features]`, and statistics `[*B, N, T]`, before dropout.
        """
        arrays, told = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        told |= {"mask": mask, "bias": bias}
        flags = {"deterministic": deterministic, "dropout_rng": dropout_rng}
        told |= {"shared_dropout": self.broadcast_dropout, "adapt": self._adapt(inputs_q)}
        result = self._run(*arrays, **told, **flags, statistics=True)
        assert result.stats is not None  # asked for above
        return self._answer(result.out, inputs_q), loud_rows(result.stats, inputs_q)

    def attention_weights(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
        query_positions: Any = None,
        key_positions: Any = None,
    ) -> Float[Array, "*B N T S"]:
        """The weights, before dropout: rows sum to 1, or to 0 where a query may see nothing.

        Args:
            inputs_q: As in the call; so are the others.
            inputs_k: As in the call.
            mask: As in the call.
            bias: As in the call.
            query_positions: As in the call.
            key_positions: As in the call.

        Returns:
            `[*B, N, T, S]`.
        """
        arrays, told = self._inputs(inputs_q, inputs_k, None, query_positions, key_positions)
        query = loud(arrays[0], inputs_q)
        return self._weights(query, arrays[1], **told, mask=mask, bias=bias)

    def _inputs(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """Query, key and value; the score and where they stand, as the engine takes them."""
        inputs_q, inputs_k, inputs_v = self._three(inputs_q, inputs_k, inputs_v)
        if key_at is None and inputs_k is inputs_q:
            key_at = query_at
        *arrays, score = self._project(inputs_q, inputs_k, inputs_v, query_at, key_at)
        told = {"score": score, "query_positions": query_at, "key_positions": key_at}
        return (arrays[0], arrays[1], arrays[2]), told

    @nn.nowrap
    def _three(self, inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of."""
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(
                    "inputs_v without inputs_k: give what the keys are made of as inputs_k"
                )
            inputs_k = inputs_q
        return inputs_q, inputs_k, inputs_k if inputs_v is None else inputs_v

    def _step(self, inputs: tuple[Any, Any, Any], valid: Any, **options: Any) -> Array:
        """The next tokens, behind those in the collection "cache"."""
        cache = stored_cache(self)
        if cache is not None:
            check_batch("inputs_q", inputs[0], cache)
            out, cache = self._append(inputs, cache, valid, **options)
            store_cache(self, cache)
            return out
        # The first call makes room: for as many tokens as it brings, and none is kept.
        _, key, value, _ = self._project(*inputs, None, None)
        *batch, length, heads, depth = key.shape
        cache = KVCache.init(
            tuple(batch), length, heads, depth, dtype=key.dtype, value_depth=value.shape[-1]
        )
        out, _ = self._append(inputs, cache, valid, **options)
        store_cache(self, cache)
        return out
