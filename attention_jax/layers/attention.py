"""Multi-head attention with any score and mask, under Flax's names."""

import dataclasses
from typing import Any

from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_flag
from attention_jax.layers.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    combine,
)
from attention_jax.layers.body import settings
from attention_jax.layers.cached_attention import CachedAttention
from attention_jax.layers.nonfinite import propagate_nan, propagate_nan_to_stats
from attention_jax.layers.training import Flag
from attention_jax.softmax import Stats


@settings
class MultiHeadAttention(CachedAttention):
    """Multi-head attention: N heads in parallel, each with its projections.

        out = Σ_n  attend(x_q W_n^query, x_k W_n^key, x_v W_n^value) W_n^out

    Names, shapes and initialisation are those of Flax's module: a checkpoint of either loads into
    the other, and outputs are equal. It differs in its options, and in three guarantees: the output
    of a query without visible keys is 0, masked keys and values never affect the result even if
    they are NaN, and by default dropout is independent for each batch entry and head.

    Args:
        precision: As in `jax.lax.Precision`, for every matrix product.
        score: A score object, whose float arrays become parameters; a recipe such as
            `additive(32)`; a name ("dot", "scaled_dot", "general", "additive", "concat",
            "cosine"); a function `(num_heads, head_dim, source) -> Score`, where `source` is the
            streams of NNX or a key of Linen; None is the scaled dot product.
        decode: Whether inputs are the next tokens only, and the layer stores keys and values, as in
            Flax. See `with_cache` for an explicit cache.

    Raises:
        ValueError: If a width is not a multiple of N, or N of K, a rate is outside [0, 1), or a
            score's name is unknown.

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.2.
        Ainslie et al. 2023, "GQA", arXiv:2305.13245, §2.2 (`num_kv_heads`).
        Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters",
        arXiv:2302.05442, §2.1 (`normalize_qk`).
    """

    _: dataclasses.KW_ONLY
    decode: bool | None = None

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
        is_causal: Flag = False,
        decode: Flag = None,
        valid: Any = None,
        deterministic: Flag = None,
        sow_weights: Flag = False,
        **random: Any,
    ) -> Float[Array, "*B T out"]:
        """The attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
            inputs_k: `[*B, S, in_kv_features]`; None is `inputs_q`.
            inputs_v: `[*B, S, in_kv_features]`; None is `inputs_k`.
            mask: A mask object or boolean array, True where a query may attend to a key, combined
                with the layer's mask. In a decoding step its keys are the cache's slots.
            key_positions: ints `[S]` or `[*B, S]`; by default those of the queries if the keys are
                projected from the same inputs, else 0..S-1.
            is_causal: Whether a query attends to keys up to its own position only.
            decode: Whether the inputs follow the tokens in the layer's internal cache: causal, with
                the cache's positions. None: the constructor's flag.
            valid: bool `[*#B, T]`, in a decoding step: which of its tokens are real.
            sow_weights: Whether to add the weights, before dropout, to the intermediates as
                "attention_weights", in O(T·S) memory. In a decoding step they cover the cache's
                slots, as in Flax, and are 0 for unwritten ones.

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError: If shapes do not fit, dropout has no random key, or the cache is missing or
                full.
            TypeError: If a mask array or a flag is not boolean.
        """
        for name, flag in (
            ("is_causal", is_causal),
            ("decode", decode),
            ("sow_weights", sow_weights),
        ):
            check_flag(name, flag)
        flags = {"deterministic": deterministic, "random": random}
        if self.decode if decode is None else decode:
            if query_positions is not None or key_positions is not None:
                raise ValueError("decode=True takes positions from the cache: give none")
            inputs = self._three(inputs_q, inputs_k, inputs_v)
            call_options = {"mask": mask, "bias": bias, "sow_weights": sow_weights}
            return self._decode_step(inputs, valid, **call_options, **flags)
        if valid is not None:
            raise ValueError("valid is for decode=True; hide tokens from all by a mask")
        arrays, where = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        mask = combine(masks.causal() if is_causal else None, mask)
        call_options = {"mask": mask, "bias": bias, **where}
        if sow_weights:
            self._sow_weights(
                self._weights(propagate_nan(arrays[0], inputs_q), arrays[1], **call_options)
            )
        return self._project_output(self._run(*arrays, **call_options, **flags).out, inputs_q)

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
        **random: Any,
    ) -> tuple[Float[Array, "*B T out"], Stats]:
        """The output, and each row's lse, entropy and largest logit, in O(T + S) memory.

        Returns:
            The output `[*B, T, out_features]`, and statistics `[*B, N, T]`, before dropout.
        """
        arrays, where = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        flags = {"deterministic": deterministic, "random": random}
        out, stats = self._run_with_stats(*arrays, mask=mask, bias=bias, **where, **flags)
        return self._project_output(out, inputs_q), propagate_nan_to_stats(stats, inputs_q)

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
        """The weights, before dropout: rows sum to 1, or to 0 for a query without visible keys.

        Returns:
            `[*B, N, T, S]`.
        """
        arrays, where = self._inputs(inputs_q, inputs_k, None, query_positions, key_positions)
        return self._weights(
            propagate_nan(arrays[0], inputs_q), arrays[1], mask=mask, bias=bias, **where
        )

    def _inputs(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """Query, key and value, and their positions, as `attend` takes them."""
        inputs = self._three(inputs_q, inputs_k, inputs_v)
        if key_at is None and inputs[1] is inputs_q:
            key_at = query_at
        arrays = self._project(*inputs, query_at, key_at)
        return arrays, {"query_positions": query_at, "key_positions": key_at}

    def _three(self, inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[Any, Any, Any]:
        """The inputs of queries, keys and values."""
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(
                    "inputs_v without inputs_k: give what the keys are made of as inputs_k"
                )
            inputs_k = inputs_q
        return inputs_q, inputs_k, inputs_k if inputs_v is None else inputs_v
