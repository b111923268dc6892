"""Multi-head attention by the families of `attention_jax.subquadratic`, with the same projections.

    TransformerEncoderLayer(8, 64, 256, attention=LinearAttention)

Each is `MultiHeadAttention` with another function of queries, keys and values. Unsupported options
(a score, a bias, dropout of weights, a cache) raise errors.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax import masks, subquadratic
from attention_jax._core.axes import Array, Shape
from attention_jax._core.numerics import precision_of_products
from attention_jax.kernels.request import Result
from attention_jax.layers import position_recipes
from attention_jax.layers.arguments import AnyBias, AnyMask, QueryInputs, combine
from attention_jax.layers.attention import MultiHeadAttention
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.nonfinite import propagate_nan, zero_filled
from attention_jax.layers.recipes import drawn
from attention_jax.layers.training import Flag
from attention_jax.masks.mask import Mask
from attention_jax.subquadratic import LinearState
from attention_jax.subquadratic.features import Features, as_feature_map


@settings
class FamilyAttention(MultiHeadAttention):
    """Base of multi-head attention without scores.

    `score, implementation, block_size, decode` and `dropout_rate` are not supported.
    """

    _refused: ClassVar[tuple[str, ...]] = (
        *("score", "implementation", "block_size", "decode", "dropout_rate"),
    )

    def _check(self, given: Any) -> None:
        name = type(self).__name__
        for option in self._refused:
            if value := getattr(given, option):
                raise ValueError(f"{name} has no {option}, got {option}={value!r}")
        super()._check(given)
        if position_recipes.recipe(given.positions).adds_bias:
            raise ValueError(
                f"{name} has no scores to add a bias to: positions may rotate queries and keys, as "
                "rotary() does, or be added to the inputs"
            )

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        raise NotImplementedError(f"{type(self).__name__} has no _attend")

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: AnyMask,
        bias: AnyBias = None,
        deterministic: Flag,
        random: Mapping[str, Any],
        statistics: bool = False,
        **positions: Any,
    ) -> Result:
        self._check_random(random)
        name = type(self).__name__
        if bias is not None:
            raise ValueError(f"{name} has no scores to add a bias to")
        if statistics:
            raise NotImplementedError(f"{name} forms no rows of weights: it has no statistics")
        if any(at is not None for at in positions.values()):
            raise NotImplementedError(f"{name} uses array indices: it takes no positions or cache")
        with precision_of_products(self.precision):
            return Result(self._attend(query, key, value, combine(self.mask, mask)))

    def _weights(self, query: Array, key: Array, **options: Any) -> Array:
        raise NotImplementedError(f"{type(self).__name__} forms no rows of weights to return")


@settings
class LinearAttention(FamilyAttention):
    """Multi-head linear attention; see `attention_jax.subquadratic.linear_attention`.

    Settings are those of `MultiHeadAttention`, except `score, implementation, block_size, decode,
    dropout_rate`.

    Args:
        mask: A mask for every call: causal order and padding.
        feature_map: φ; None is `elu_features()`. Its arrays, such as random features, are
            constants.
        chunk_size: Tokens in a chunk; None selects it automatically.

    Raises:
        ValueError: If an option is not supported, or as in `MultiHeadAttention`.

    References:
        Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, eq. 5.
    """

    _: dataclasses.KW_ONLY
    feature_map: Features = None
    chunk_size: int | None = None

    _counts = (*FamilyAttention._counts, "chunk_size")
    _with_arrays: ClassVar[Mapping[str, Any]] = {
        **FamilyAttention._with_arrays,
        "feature_map": as_feature_map,
    }

    def _check(self, given: Any) -> None:
        super()._check(given)
        features = as_feature_map(given.feature_map)
        if (width := given.qkv_features or given.in_features) is not None:
            features.check(width // given.num_heads, 0)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        how = {"feature_map": self.feature_map, "chunk_size": self.chunk_size}
        return subquadratic.linear_attention(query, key, value, mask=mask, **how)

    def with_state(
        self, inputs: QueryInputs, state: LinearState | None = None, *, mask: AnyMask = None
    ) -> tuple[Float[Array, "*B T out"], LinearState]:
        """Causal self-attention of the next tokens over a recurrent state.

        The results equal the rows of the full causal pass for any chunking.

        Args:
            inputs: `[*B, T, in_features]`, of the T next tokens.
            state: The state after the previous tokens; None at the start.
            mask: Padding among the next tokens, combined with causality.

        Returns:
            `[*B, T, out_features]`, and the updated state.
        """
        start = 0 if state is None else state.index
        at = start + jnp.arange(inputs.shape[-2], dtype=jnp.int32)
        arrays = self._project(inputs, inputs, inputs, at, at)
        how = {"feature_map": self.feature_map, "chunk_size": self.chunk_size}
        how["mask"] = combine(masks.causal(), self.mask, mask)
        out, state = subquadratic.linear_attention_with_state(*arrays, state, **how)
        return self._project_output(out, inputs), state


@settings
class LowRankAttention(FamilyAttention):
    """Multi-head Linformer; see `attention_jax.subquadratic.low_rank_attention`.

    Settings are as in `LinearAttention`.

    Args:
        mask: A mask for every call: padding.
        length: The maximum length of keys and values; shorter ones use the first columns.
        rank: M, the number of rows that keys and values are projected to.
        share_projections: Whether values use the keys' projection.

    References:
        Wang et al. 2020, "Linformer", arXiv:2006.04768, eq. 7.
    """

    _: dataclasses.KW_ONLY
    length: int
    rank: int
    share_projections: bool = False

    _counts = (*FamilyAttention._counts, "length", "rank")

    def _build(self, make: Construction) -> None:
        super()._build(make)
        init, shape, dtype = make.given.kernel_init, (self.rank, self.length), self.param_dtype
        self.key_projection, self.value_projection = (
            make.param(name, lambda key: drawn(init, key, shape, dtype)) if own else None
            for name, own in (
                ("key_projection", True),
                ("value_projection", not self.share_projections),
            )
        )

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        S = key.shape[-3]
        if S > self.length:
            raise ValueError(f"keys have length {S}, but the layer was made for {self.length}")
        down_key, down_value = (
            None if down is None else down[...][:, :S]
            for down in (self.key_projection, self.value_projection)
        )
        return subquadratic.low_rank_attention(query, key, value, down_key, down_value, mask=mask)


@settings
class NystromAttention(FamilyAttention):
    """Multi-head Nyström attention; see `attention_jax.subquadratic.nystrom_attention`.

    Settings are as in `LinearAttention`.

    Args:
        mask: A mask for every call: padding.
        num_landmarks: M, the number of landmarks.
        iterations: Number of iterations of the pseudo-inverse.

    References:
        Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902.
    """

    _: dataclasses.KW_ONLY
    num_landmarks: int = 64
    iterations: int = 6

    _counts = (*FamilyAttention._counts, "num_landmarks", "iterations")

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"num_landmarks": self.num_landmarks, "iterations": self.iterations}
        return subquadratic.nystrom_attention(query, key, value, mask=mask, **sizes)


@settings
class MemoryCompressedAttention(FamilyAttention):
    """Multi-head memory-compressed attention.

    See `attention_jax.subquadratic.memory_compressed_attention`. Settings are as in
    `LinearAttention`.

    Args:
        stride: The number of keys that are compressed to one.
        convolution: Whether to compress by a learned convolution instead of the mean.

    References:
        Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198,
        §4.2.3.
    """

    _: dataclasses.KW_ONLY
    stride: int = 3
    convolution: bool = True

    _counts = (*FamilyAttention._counts, "stride")

    def _build(self, make: Construction) -> None:
        super()._build(make)
        if not self.convolution:
            return
        init, dtype = make.given.kernel_init, self.param_dtype

        def draw(key: Array, shape: Shape) -> Array:
            flat = (shape[0] * shape[1], shape[2])  # with the fan of a matrix
            return drawn(init, key, flat, dtype).reshape(shape)

        known = (self.qkv_features or self.in_features) is not None
        heads = self._heads(None)[1:] if known else (None, None)
        for name, own in zip(("key_kernel", "value_kernel"), heads, strict=True):
            shape = None if own is None else (self.stride, own[1], own[1])
            make.late_param(name, shape, draw)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        kernels = {}
        if self.convolution:
            for name, x in (("key_kernel", key), ("value_kernel", value)):
                kernels[name] = self._late(name, (self.stride, x.shape[-1], x.shape[-1]))
        return subquadratic.memory_compressed_attention(
            query, key, value, self.stride, mask=mask, **kernels
        )


@settings
class LSHAttention(FamilyAttention):
    """Multi-head Reformer self-attention; see `attention_jax.subquadratic.lsh_attention`.

    Queries are also the keys, so there is no key projection, and `num_kv_heads` applies to the
    values. The hash is drawn once, from the stream of the parameters. Settings are as in
    `LinearAttention`, without `fused_qkv`.

    Args:
        num_buckets: See `lsh_attention`.
        num_rounds: See `lsh_attention`.
        window: See `lsh_attention`.

    References:
        Kitaev et al. 2020, "Reformer", arXiv:2001.04451, §2.
    """

    _: dataclasses.KW_ONLY
    num_buckets: int | tuple[int, ...] | None = None
    num_rounds: int = 1
    window: int | None = None

    _counts = (*FamilyAttention._counts, "num_rounds", "window")
    _refused = (*FamilyAttention._refused, "fused_qkv")

    def _build(self, make: Construction) -> None:
        super()._build(make)
        make.discard("key", "key_ln")
        self.hash_key = make.hash_key()

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array]:
        if inputs_k is not inputs_q:
            raise ValueError("LSHAttention is self-attention: its keys are made of inputs_q alone")
        self._check_inputs(inputs_q, inputs_k, inputs_v)
        heads, x = self._heads(inputs_q.shape[-1]), zero_filled(inputs_q)
        query = self._part("positions").rotate(
            propagate_nan(self._query(x, heads), inputs_q), query_at
        )
        value = self._linear(self.value, zero_filled(inputs_v), heads[2])
        return query, query, propagate_nan(value, inputs_v)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        hash_key = jax.random.wrap_key_data(self.hash_key[...])
        sizes = {"num_buckets": self.num_buckets, "num_rounds": self.num_rounds}
        return subquadratic.lsh_attention(
            query, value, hash_key, window=self.window, mask=mask, **sizes
        )


@settings
class RoutedAttention(FamilyAttention):
    """Multi-head routed block attention; see `attention_jax.subquadratic.routed_attention`.

    Settings are as in `LinearAttention`.

    Args:
        block_size: Block length of queries and keys; None is 64.
        num_blocks: The number of key blocks selected for each query block.

    References:
        Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189.
    """

    _: dataclasses.KW_ONLY
    num_blocks: int = 4

    _counts = (*FamilyAttention._counts, "block_size", "num_blocks")
    _refused = ("score", "implementation", "decode", "dropout_rate")

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"block_size": self.block_size or 64, "num_blocks": self.num_blocks}
        return subquadratic.routed_attention(query, key, value, mask=mask, **sizes)
