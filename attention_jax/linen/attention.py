"""Multi-head attention with any score, any mask and the engine's memory, under Flax's names."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array, check_count
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    KeyInputs,
    QueryInputs,
    ValueInputs,
    check_width,
    combine,
    head_depth,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, Initializer, Sizes
from attention_jax._modules.shield import shielded
from attention_jax.linen.base import AttentionLayer
from attention_jax.linen.decode import extend
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.scores import AnyScore, ScoreParameters, check_score
from attention_jax.softmax import Stats


class MultiHeadAttention(AttentionLayer):
    """Multi-head attention: N attentions side by side, each on its own projections.

        out = Σ_n  attend(x_q W_n^query, x_k W_n^key, x_v W_n^value) W_n^out

    Names, shapes and initialisation are those of `flax.linen.MultiHeadDotProductAttention`: a
    checkpoint of either loads into the other, and outputs are equal. It differs in what it adds,
    and in three promises: a query that may see nothing gets 0, masked keys and values do not matter
    even when they are NaN, and dropout is independent for each batch entry and head unless asked
    otherwise. Where the constructor and the call both give `deterministic`, the call's holds.

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
        decode: Whether keys and values are kept in the collection "cache" and calls bring the next
            tokens only, one or several. `init` with inputs of the greatest length makes room.
        normalize_qk: Whether queries and keys go through a LayerNorm each, without bias.
        score: A score object, whose float arrays train from then on; a recipe such as
            `attention_jax.linen.additive(32)`; a name ("dot", "scaled_dot", "general", "additive",
            "concat", "cosine"); a function `(num_heads, head_dim, key) -> Score`; None is the
            scaled dot product.
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

    num_heads: int
    in_features: int | None = None
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    in_kv_features: int | None = None
    _: dataclasses.KW_ONLY
    broadcast_dropout: bool = False
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = BIAS_INIT
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool = False
    score: AnyScore = None

    def __post_init__(self) -> None:
        for name in ("in_features", "qkv_features", "out_features", "in_kv_features"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        check_count("num_heads", self.num_heads, 1)
        known = self.in_features if self.qkv_features is None else self.qkv_features
        head_depth(self.num_heads if known is None else known, self.num_heads, self._kv_heads())
        check_score(self.score)
        super().__post_init__()

    def __call__(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        inputs_v: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
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
                and the layer's own must allow a pair. In a decoding step its keys are the cache's.
            bias: Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".
            sow_weights: Whether to put the weights, before dropout, into the collection
                "intermediates" as "attention_weights".

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError: If shapes do not fit, or in training there is no randomness.
            TypeError: If a mask array is not boolean.
        """
        options = {
            "mask": mask,
            "bias": bias,
            "deterministic": deterministic,
            "dropout_rng": dropout_rng,
        }
        return self._forward(inputs_q, inputs_k, inputs_v, sow_weights=sow_weights, **options)[0]

    def with_stats(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        inputs_v: ValueInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
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
            deterministic: As in the call.
            dropout_rng: As in the call.

        Returns:
            The output `[*B, T, out_features]`, and statistics `[*B, N, T]`, before dropout.
        """
        options = {
            "mask": mask,
            "bias": bias,
            "deterministic": deterministic,
            "dropout_rng": dropout_rng,
        }
        return self._forward(inputs_q, inputs_k, inputs_v, statistics=True, **options)

    def attention_weights(
        self,
        inputs_q: QueryInputs,
        inputs_k: KeyInputs | None = None,
        *,
        mask: AnyMask = None,
        bias: AnyBias = None,
    ) -> Float[Array, "*B N T S"]:
        """The weights, before dropout: rows sum to 1, or to 0 where a query may see nothing.

        Args:
            inputs_q: As in the call; so are the others.
            inputs_k: As in the call.
            mask: As in the call.
            bias: As in the call.

        Returns:
            `[*B, N, T, S]`.
        """
        return self._forward(inputs_q, inputs_k, None, mask=mask, bias=bias, only_weights=True)

    @nn.compact
    def _forward(
        self,
        inputs_q: Any,
        inputs_k: Any,
        inputs_v: Any,
        *,
        mask: AnyMask,
        bias: AnyBias,
        deterministic: Flag = None,
        dropout_rng: Any = None,
        statistics: bool = False,
        sow_weights: bool = False,
        only_weights: bool = False,
    ) -> Any:
        """Everything that has parameters: `(out, stats)`, or the weights alone."""
        inputs_k, inputs_v = self._inputs(inputs_q, inputs_k, inputs_v)
        width = inputs_q.shape[-1]
        features = width if self.qkv_features is None else self.qkv_features
        depth = head_depth(features, self.num_heads, self._kv_heads())
        query, key = (
            shielded(self._to_heads(name, heads, depth), x)
            for name, heads, x in (
                ("query", self.num_heads, inputs_q),
                ("key", self._kv_heads(), inputs_k),
            )
        )
        sizes = Sizes(self.num_heads, depth, depth, self.param_dtype, self.kernel_init)
        score = ScoreParameters(self.score, self.dtype, name="score")(sizes)
        told: dict[str, Any] = {"score": score, "bias": bias}
        if only_weights and not self.decode:
            return self._weights(query, key, mask=mask, **told)
        value = shielded(self._to_heads("value", self._kv_heads(), depth, norm=False), inputs_v)
        valid = None
        if self.decode:
            key, value, causal, positions, valid = extend(self, key, value, keep=not only_weights)
            told |= positions
            mask = combine(causal, mask)
        if only_weights:
            return self._weights(query, key, mask=mask, **told)
        if sow_weights:
            weights = self._weights(query, key, mask=mask, **told)
            self.sow("intermediates", "attention_weights", weights)
        result = self._run(
            query,
            key,
            value,
            mask=mask,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            shared_dropout=self.broadcast_dropout,
            statistics=statistics,
            **told,
        )
        if valid is not None:
            result = jax.tree.map(lambda x: jnp.where(valid, x, jnp.nan), result)
        out = self._dense(
            "out",
            width if self.out_features is None else self.out_features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
        )
        return out(result.out), result.stats

    @nn.nowrap
    def _kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @nn.nowrap
    def _inputs(self, inputs_q: Any, inputs_k: Any, inputs_v: Any) -> tuple[Any, Any]:
        """Keys' and values' inputs, all three checked."""
        if inputs_k is None:
            if inputs_v is not None:
                raise ValueError(
                    "inputs_v without inputs_k: give what the keys are made of as inputs_k"
                )
            inputs_k = inputs_q
        inputs_v = inputs_k if inputs_v is None else inputs_v
        kv_features = self.in_features if self.in_kv_features is None else self.in_kv_features
        for name, x, features, letters in (
            ("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]"),
            ("inputs_k", inputs_k, kv_features, "[*B, S, in_kv_features]"),
            ("inputs_v", inputs_v, kv_features, "[*B, S, in_kv_features]"),
        ):
            shape = np.shape(as_array(name, x))
            comes = shape[-1] if shape else 0
            check_width(name, x, comes if features is None else features, letters)
        return inputs_k, inputs_v

    @nn.nowrap
    def _dense(self, name: str, features: Any, **options: Any) -> nn.DenseGeneral:
        given = {"kernel_init": self.kernel_init, "bias_init": self.bias_init, **options}
        return nn.DenseGeneral(
            features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            name=name,
            **given,
        )

    @nn.nowrap
    def _to_heads(
        self, name: str, heads: int, depth: int, *, norm: bool = True
    ) -> Callable[[Array], Array]:
        """The projection of that name and, for queries and keys, the norm behind it."""
        dense = self._dense(name, (heads, depth))
        if not (norm and self.normalize_qk):
            return dense
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        after = LayerNorm(use_bias=False, name=f"{name}_ln", **dtypes)
        return lambda x: after(dense(x))
