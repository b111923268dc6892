"""Multi-head attention with any score, any mask and the engine's memory, under Flax's names."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    combine,
    head_depth,
)
from attention_jax._modules.caches import check_batch
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, KERNEL_INIT, Initializer, Sizes
from attention_jax._modules.settings import check_settings
from attention_jax._modules.shield import loud, loud_rows
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.places import AnyPositions, PositionParameters
from attention_jax.nnx.projection import ProjectedAttention
from attention_jax.nnx.randomness import AnyRngs, check_rngs
from attention_jax.nnx.scores import AnyScore, ScoreParameters
from attention_jax.softmax import Stats

Metadata = Mapping[str, Any]
_NONE: Metadata = MappingProxyType({})


class MultiHeadAttention(ProjectedAttention):
    """Multi-head attention: N attentions side by side, each on its own projections.

        out = Σ_n  attend(x_q W_n^query, x_k W_n^key, x_v W_n^value) W_n^out

    Names, shapes and initialisation are those of `flax.nnx.MultiHeadAttention`: a checkpoint of
    either loads into the other, and outputs are equal. It differs in what it adds, and in three
    promises: a query that may see nothing gets 0, masked keys and values do not matter even when
    they are NaN, and dropout is independent for each batch entry and head unless asked otherwise.

    Args:
        num_heads: N, the number of query heads.
        in_features: Width of `inputs_q`.
        qkv_features: D, the width that the heads share, a multiple of N; None is `in_features`.
        out_features: Width of the output; None is `in_features`.
        num_kv_heads: K, the number of key/value heads, of which N is a multiple; None is N. Query
            head n uses key/value head n // (N // K).
        in_kv_features: Width of `inputs_k` and `inputs_v`; None is `in_features`.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        broadcast_dropout: One dropout mask `[T, S]` for all batch entries and heads.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`, for every matrix product.
        kernel_init: Initialiser of the kernels, and of the score's.
        out_kernel_init: That of the output kernel; None is `kernel_init`.
        bias_init: Initialiser of the biases.
        out_bias_init: That of the output bias; None is `bias_init`.
        use_bias: Whether the projections have biases.
        normalize_qk: Whether queries and keys go through a LayerNorm each, without bias.
        score: A score object, whose float arrays train from then on; a recipe such as
            `attention_jax.nnx.additive(32)`; a name ("dot", "scaled_dot", "general", "additive",
            "concat", "cosine"); a function `(num_heads, head_dim, rngs) -> Score`; None is the
            scaled dot product.
        mask: A mask object or boolean array that holds in every call.
        positions: A position scheme: a recipe such as `attention_jax.nnx.rotary()`, a name
            ("rotary", "alibi", "relative_bias", "shaw"), or a bias object, whose float arrays train
            from then on; None is none.
        value_features: The width that the values of N heads have, a multiple of N; None is
            `qkv_features`.
        fused_qkv: Whether self-attention makes queries, keys and values in one matrix product. The
            parameters are the same, and so are the numbers. Projections that were replaced, as by
            an adapter or a quantised layer, are called one by one.
        decode: Whether calls bring the next tokens only, and keys and values are kept in the layer,
            as in Flax; `init_cache` makes room. See `with_cache` for state in, state out.
        force_fp32_for_softmax: Whether weights, sown or returned, are float32 at least, not of the
            queries' dtype. The softmax is in any case.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
        rngs: Streams for the parameters and, with a rate, "dropout".
        keep_rngs: Whether the layer keeps a dropout stream; without one training calls give `rngs`.
        kernel_metadata: What every kernel's variable carries besides, such as an `out_sharding`.
        out_kernel_metadata: That of the output kernel; empty is `kernel_metadata`.
        bias_metadata: That of the biases.
        out_bias_metadata: That of the output bias; empty is `bias_metadata`.
        query_ln_scale_metadata: That of the scale that normalises queries.
        key_ln_scale_metadata: That of the scale that normalises keys.

    Raises:
        ValueError: If a width is no multiple of the heads, or N of K, a rate lies outside [0, 1),
            or a score's name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import MultiHeadAttention, additive
        >>> layer = MultiHeadAttention(
        ...     4, 16, score=additive(8), mask=aj.masks.causal(), rngs=nnx.Rngs(0)
        ... )
        >>> x = jnp.ones((2, 7, 16))
        >>> layer(x).shape, layer.attention_weights(x).shape
        ((2, 7, 16), (2, 4, 7, 7))

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.2.
        Ainslie et al. 2023, "GQA", arXiv:2305.13245, §2.2 (`num_kv_heads`).
        Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters",
        arXiv:2302.05442, §2.1 (`normalize_qk`).
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        broadcast_dropout: bool = False,
        dropout_rate: float | int = 0.0,
        deterministic: Flag = None,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = BIAS_INIT,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        normalize_qk: bool = False,
        score: AnyScore = None,
        mask: AnyMask = None,
        positions: AnyPositions = None,
        value_features: int | None = None,
        fused_qkv: bool = False,
        decode: bool | None = None,
        force_fp32_for_softmax: bool = False,
        implementation: str | tuple[str, ...] | None = None,
        block_size: int | tuple[int, int] | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = _NONE,
        out_kernel_metadata: Metadata = _NONE,
        bias_metadata: Metadata = _NONE,
        out_bias_metadata: Metadata = _NONE,
        query_ln_scale_metadata: Metadata = _NONE,
        key_ln_scale_metadata: Metadata = _NONE,
    ) -> None:
        check_rngs(type(self).__name__, rngs)
        check_settings(
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            bias_init=bias_init,
            out_bias_init=out_bias_init,
            use_bias=use_bias,
            normalize_qk=normalize_qk,
            fused_qkv=fused_qkv,
            decode=decode,
            force_fp32_for_softmax=force_fp32_for_softmax,
        )
        self.force_fp32_for_softmax = force_fp32_for_softmax
        self.num_heads = num_heads
        self.in_features = check_count("in_features", in_features, 1)
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_count("out_features", self.out_features, 1)
        check_count("in_kv_features", self.in_kv_features, 1)
        self.head_dim = head_depth(self.qkv_features, self.num_heads, self.num_kv_heads)
        self.value_dim = self.head_dim
        if value_features is not None:
            check_count("value_features", value_features, 1)
            if value_features % num_heads:
                raise ValueError(
                    f"value_features {value_features} must be a multiple of "
                    f"num_heads {num_heads} (N)"
                )
            self.value_dim = value_features // num_heads
        if fused_qkv and self.in_kv_features != in_features:
            raise ValueError(
                f"fused_qkv needs one input for queries, keys and values, but in_features is "
                f"{in_features} and in_kv_features {self.in_kv_features}"
            )
        self.fused_qkv = fused_qkv
        self.decode = decode
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.normalize_qk = normalize_qk
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        options = {"use_bias": use_bias, "precision": precision, "rngs": rngs, **dtypes}
        inits = {"kernel_init": kernel_init, "bias_init": bias_init}
        inits |= {"kernel_metadata": kernel_metadata, "bias_metadata": bias_metadata}
        heads, kv_heads = (num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        value_heads = (self.num_kv_heads, self.value_dim)
        # Order matters: from the same seed Flax draws the same numbers.
        self.query = nnx.LinearGeneral(in_features, heads, **inits, **options)
        self.key = nnx.LinearGeneral(self.in_kv_features, kv_heads, **inits, **options)
        self.value = nnx.LinearGeneral(self.in_kv_features, value_heads, **inits, **options)
        self.query_ln: LayerNorm | None = nnx.data(None)
        self.key_ln: LayerNorm | None = nnx.data(None)
        if normalize_qk:
            norms = {"use_bias": False, "rngs": rngs, **dtypes}
            self.query_ln = LayerNorm(
                self.head_dim, scale_metadata=query_ln_scale_metadata, **norms
            )
            self.key_ln = LayerNorm(self.head_dim, scale_metadata=key_ln_scale_metadata, **norms)
        self.out = nnx.LinearGeneral(
            (num_heads, self.value_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=kernel_init if out_kernel_init is None else out_kernel_init,
            bias_init=bias_init if out_bias_init is None else out_bias_init,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
            **options,
        )
        self._settle(
            mask=mask,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            precision=precision,
            implementation=implementation,
            block_size=block_size,
            rngs=rngs,
            keep_rngs=keep_rngs,
        )
        sizes = Sizes(num_heads, self.head_dim, self.head_dim, param_dtype, kernel_init)
        self.score = ScoreParameters(score, sizes, dtype=dtype, rngs=rngs)
        self.positions = PositionParameters(positions, sizes, dtype=dtype, rngs=rngs)
        self._forget()

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
        decode: bool | None = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        sow_weights: bool = False,
    ) -> Float[Array, "*B T out"]:
        """The attention of `inputs_q` to `inputs_k` and `inputs_v`.

        Args:
            inputs_q: `[*B, T, in_features]`.
            inputs_k: `[*B, S, in_kv_features]`; None is `inputs_q`.
            inputs_v: `[*B, S, in_kv_features]`; None is `inputs_k`.
            mask: A mask object or boolean array, True where a query may see a key; both this one
                and the layer's own must allow a pair.
            bias: Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.
            query_positions: ints `[T]` or `[*B, T]`, 0..T-1 by default.
            key_positions: ints `[S]` or `[*B, S]`; by default those of the queries where the keys
                are made of the same inputs, else 0..S-1.
            is_causal: Whether a query sees keys up to its own position only.
            decode: Whether the inputs are the tokens after those in the layer's own cache, as many
                as there are: self-attention, causal, with the cache's positions; the keys of a mask
                array are the cache's slots. None is the constructor's.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where the dropout key comes from; wins over the layer's own stream.
            sow_weights: Whether to sow the weights, before dropout, as the intermediate
                "attention_weights"; that takes O(T·S) memory. As in Flax a decoding step's are over
                the cache's slots, 0 for those not written yet. Outside `flax.nnx.capture` they take
                the place of the method of that name until `flax.nnx.pop` takes them out.

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError: If shapes do not fit, in training there is no randomness, or the cache is
                missing or full.
            TypeError: If a mask array is not boolean.
        """
        flags = {"deterministic": deterministic, "rngs": rngs}
        if self.decode if decode is None else decode:
            self._check_decode(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
            told = {"mask": mask, "bias": bias, "sow_weights": sow_weights}
            cache = self._own_cache()
            check_batch("inputs_q", inputs_q, cache)
            out, cache = self._append(inputs_q, cache, None, **told, **flags)
            self._keep(cache)
            return out
        arrays, where = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        mask = combine(masks.causal() if is_causal else None, mask)
        if sow_weights:
            query = loud(arrays[0], inputs_q)
            self._sow(self._weights(query, arrays[1], mask=mask, bias=bias, **where))
        seen = self._run(*arrays, mask=mask, bias=bias, **where, **flags).out
        return self._answer(seen, inputs_q)

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
        rngs: AnyRngs = None,
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
            rngs: As in the call.

        Returns:
            The output `[*B, T, out_features]`, and statistics `[*B, N, T]`, before dropout.
        """
        arrays, where = self._inputs(inputs_q, inputs_k, inputs_v, query_positions, key_positions)
        flags = {"deterministic": deterministic, "rngs": rngs}
        seen, stats = self._run_with_stats(*arrays, mask=mask, bias=bias, **where, **flags)
        return self._answer(seen, inputs_q), loud_rows(stats, inputs_q)

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
        arrays, where = self._inputs(inputs_q, inputs_k, None, query_positions, key_positions)
        query = loud(arrays[0], inputs_q)
        return self._weights(query, arrays[1], mask=mask, bias=bias, **where)

    def _inputs(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
        """Query, key and value, and where they stand, as the engine takes them."""
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(
                    "inputs_v without inputs_k: give what the keys are made of as inputs_k"
                )
            inputs_k = inputs_q
        if key_at is None and inputs_k is inputs_q:
            key_at = query_at
        inputs_v = inputs_k if inputs_v is None else inputs_v
        arrays = self._project(inputs_q, inputs_k, inputs_v, query_at, key_at)
        return arrays, {"query_positions": query_at, "key_positions": key_at}

    def _check_decode(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> None:
        if any(x is not None and x is not inputs_q for x in (inputs_k, inputs_v)):
            raise ValueError(
                "decode=True is self-attention and makes keys and values of inputs_q alone; for a "
                "memory that stays use `remember` and `recall`"
            )
        if query_at is not None or key_at is not None:
            raise ValueError("decode=True takes positions from the cache: give none")
