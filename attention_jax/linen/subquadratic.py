"""Multi-head attention by the families of `attention_jax.subquadratic`, with the same projections.

    TransformerEncoderLayer(8, 64, 256, attention=LinearAttention)

Each is `MultiHeadAttention` with another way from queries, keys and values to the output. What a
family has no place for (a score, a bias, dropout of weights, a cache) is refused.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax import masks, subquadratic
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import precision_of_products
from attention_jax._modules.arguments import AnyBias, AnyMask, QueryInputs, combine
from attention_jax._modules.recipes import Initializer, drawn
from attention_jax._modules.shield import shielded
from attention_jax.kernels.request import Result
from attention_jax.linen.attention import MultiHeadAttention
from attention_jax.masks.mask import Mask
from attention_jax.scores.score import Score, Sum
from attention_jax.subquadratic import LinearState
from attention_jax.subquadratic.features import Features, as_feature_map


class FamilyAttention(MultiHeadAttention, kw_only=True):
    """What the modules of this file share: projections from `MultiHeadAttention`, and refusals."""

    def __post_init__(self) -> None:
        for option in ("score", "implementation", "decode", "dropout_rate", *self._has_none_of()):
            if getattr(self, option):
                given = f"{option}={getattr(self, option)!r}"
                raise ValueError(f"{type(self).__name__} has no {option}, got {given}")
        super().__post_init__()

    @nn.nowrap
    def _has_none_of(self) -> tuple[str, ...]:
        return ("block_size",)

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        raise NotImplementedError(f"{type(self).__name__} has no _attend")

    @nn.nowrap
    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        score: Score,
        mask: AnyMask,
        bias: AnyBias,
        deterministic: Any,
        dropout_rng: Any,
        shared_dropout: bool = False,
        statistics: bool = False,
        **positions: Any,
    ) -> Result:
        name = type(self).__name__
        if bias is not None or isinstance(score, Sum):
            raise ValueError(
                f"{name} has no scores to add a bias to: positions may turn queries and keys, as "
                "rotary() does, or be added to the inputs"
            )
        if statistics:
            raise NotImplementedError(f"{name} forms no rows of weights: it has no statistics")
        if any(at is not None for at in positions.values()):
            raise NotImplementedError(f"{name} goes by array index: it takes no positions or cache")
        with precision_of_products(self.precision):
            return Result(self._attend(query, key, value, combine(self.mask, mask)))

    @nn.nowrap
    def _weights(self, query: Array, key: Array, **options: Any) -> Array:
        raise NotImplementedError(f"{type(self).__name__} forms no rows of weights to return")


class LinearAttention(FamilyAttention, kw_only=True):
    """Multi-head linear attention; see `attention_jax.subquadratic.linear_attention`.

    Other arguments are those of `MultiHeadAttention`, but for `score, implementation, block_size,
    decode, dropout_rate`. The mask may be causal order and padding.

    Args:
        feature_map: φ; None is `elu_features()`. Arrays in it, such as random features, are no
            parameters.
        chunk_size: Tokens in a chunk; None picks.

    Raises:
        ValueError: If an option has no place here, or as in `MultiHeadAttention`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> from attention_jax.linen import LinearAttention
        >>> layer, x = LinearAttention(4, mask=aj.masks.causal()), jnp.ones((2, 7, 16))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 7, 16)

    References:
        Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, eq. 5.
    """

    feature_map: Features = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        as_feature_map(self.feature_map)
        if self.chunk_size is not None:
            check_count("chunk_size", self.chunk_size, 1)
        super().__post_init__()

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        return subquadratic.linear_attention(
            query, key, value, feature_map=self.feature_map, chunk_size=self.chunk_size, mask=mask
        )

    def with_state(
        self, inputs: QueryInputs, state: LinearState | None = None, *, mask: AnyMask = None
    ) -> tuple[Float[Array, "*B T out"], LinearState]:
        """Causal self-attention of the next tokens, state in and state out.

        Whatever the parts, together they give the rows of the full causal pass.

        Args:
            inputs: `[*B, T, in_features]`, of the T next tokens.
            state: Of the tokens before; None is none.
            mask: Besides causality, padding among the next tokens.

        Returns:
            `[*B, T, out_features]`, and the next state.
        """
        start = 0 if state is None else state.index
        at = start + jnp.arange(inputs.shape[-2], dtype=jnp.int32)
        query, key, value, _ = self._project(inputs, inputs, inputs, at, at)
        out, state = subquadratic.linear_attention_with_state(
            query,
            key,
            value,
            state,
            feature_map=self.feature_map,
            chunk_size=self.chunk_size,
            mask=combine(masks.causal(), self.mask, mask),
        )
        return self._answer(out, inputs), state


class LowRankAttention(FamilyAttention, kw_only=True):
    """Multi-head Linformer; see `attention_jax.subquadratic.low_rank_attention`.

    Other arguments are as in `LinearAttention`; the mask may be padding.

    Args:
        length: The greatest length of keys and values; shorter ones use the first columns.
        rank: M, how many rows keys and values are projected to.
        share_projections: Whether values use the keys' projection.

    References:
        Wang et al. 2020, "Linformer", arXiv:2006.04768, eq. 7.
    """

    length: int
    rank: int
    share_projections: bool = False

    def __post_init__(self) -> None:
        check_count("length", self.length, 1)
        check_count("rank", self.rank, 1)
        super().__post_init__()

    def setup(self) -> None:
        """The parts, and the projections along the sequence."""
        super().setup()
        draw = functools.partial(drawn, self.kernel_init)
        drawing = (draw, (self.rank, self.length), self.param_dtype)
        self.key_projection = self.param("key_projection", *drawing)
        self.value_projection = self.key_projection
        if not self.share_projections:
            self.value_projection = self.param("value_projection", *drawing)

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        S = key.shape[-3]
        if S > self.length:
            raise ValueError(f"keys have length {S}, but the layer was made for {self.length}")
        downs = self.key_projection[:, :S], self.value_projection[:, :S]
        return subquadratic.low_rank_attention(query, key, value, *downs, mask=mask)


class NystromAttention(FamilyAttention, kw_only=True):
    """Multi-head Nyström attention; see `attention_jax.subquadratic.nystrom_attention`.

    Other arguments are as in `LinearAttention`; the mask may be padding.

    Args:
        num_landmarks: M, how many.
        iterations: Of the pseudo-inverse.

    References:
        Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902.
    """

    num_landmarks: int = 64
    iterations: int = 6

    def __post_init__(self) -> None:
        check_count("num_landmarks", self.num_landmarks, 1)
        check_count("iterations", self.iterations, 1)
        super().__post_init__()

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"num_landmarks": self.num_landmarks, "iterations": self.iterations}
        return subquadratic.nystrom_attention(query, key, value, mask=mask, **sizes)


class MemoryCompressedAttention(FamilyAttention, kw_only=True):
    """Multi-head attention to compressed keys and values.

    See `attention_jax.subquadratic.memory_compressed_attention`. Other arguments are as in
    `LinearAttention`.

    Args:
        stride: How many keys become one.
        convolution: Whether by a convolution with parameters of its own, or by the mean.

    References:
        Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198,
        §4.2.3.
    """

    stride: int = 3
    convolution: bool = True

    def __post_init__(self) -> None:
        check_count("stride", self.stride, 1)
        super().__post_init__()

    def setup(self) -> None:
        """The parts, and the kernels."""
        super().setup()
        if not self.convolution:
            self._key_kernel = self._value_kernel = None
            return
        options = {"kernel_init": self.kernel_init, "param_dtype": self.param_dtype}
        self._key_kernel = _Kernel("key_kernel", **options)
        self._value_kernel = _Kernel("value_kernel", **options)
        nn.share_scope(self, self._key_kernel)
        nn.share_scope(self, self._value_kernel)

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        kernels = {}
        if self._key_kernel is not None and self._value_kernel is not None:
            kernels["key_kernel"] = self._key_kernel(self.stride, key.shape[-1])
            kernels["value_kernel"] = self._value_kernel(self.stride, value.shape[-1])
        return subquadratic.memory_compressed_attention(
            query, key, value, self.stride, mask=mask, **kernels
        )


class _Kernel(nn.Module):
    """The kernel of a strided convolution, whose depth is known when the inputs come.

    It shares the scope of its layer: there it is one parameter, `called` so.
    """

    called: str
    kernel_init: Initializer
    param_dtype: Any

    @nn.compact
    def __call__(self, stride: int, size: int) -> Array:
        def draw(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
            flat = (stride * size, size)  # with the fan of a matrix
            return self.kernel_init(key, flat, dtype).reshape(shape)

        return self.param(self.called, draw, (stride, size, size), self.param_dtype)


class LSHAttention(FamilyAttention, kw_only=True):
    """Multi-head Reformer self-attention; see `attention_jax.subquadratic.lsh_attention`.

    Queries are keys as well, so there is no projection to keys. The hash is drawn once, from the
    stream of the parameters, and kept in the collection "hash". Other arguments are as in
    `LinearAttention`, without `fused_qkv`.

    Args:
        num_buckets: See `lsh_attention`.
        num_rounds: See `lsh_attention`.
        window: See `lsh_attention`.

    References:
        Kitaev et al. 2020, "Reformer", arXiv:2001.04451, §2.
    """

    num_buckets: int | tuple[int, ...] | None = None
    num_rounds: int = 1
    window: int | None = None

    def __post_init__(self) -> None:
        check_count("num_rounds", self.num_rounds, 1)
        if self.window is not None:
            check_count("window", self.window, 1)
        super().__post_init__()

    @nn.nowrap
    def _has_none_of(self) -> tuple[str, ...]:
        return ("block_size", "fused_qkv")

    def setup(self) -> None:
        """The parts, and the hash."""
        super().setup()
        self.hash_key = self.variable(
            "hash", "hash_key", lambda: jax.random.key_data(self.make_rng("params"))
        )

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array, Score]:
        if inputs_k is not inputs_q:
            raise ValueError("LSHAttention is self-attention: its keys are made of inputs_q alone")
        self._check(inputs_q, inputs_k, inputs_v)
        sizes = self._sizes(inputs_q.shape[-1])
        query = self._placed.turn(shielded(self._to_query(sizes), inputs_q), query_at)
        return query, query, shielded(self._to_value(sizes), inputs_v), self._score(sizes)

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        hash_key = jax.random.wrap_key_data(self.hash_key.value)
        sizes = {"num_buckets": self.num_buckets, "num_rounds": self.num_rounds}
        return subquadratic.lsh_attention(
            query, value, hash_key, window=self.window, mask=mask, **sizes
        )


class RoutedAttention(FamilyAttention, kw_only=True):
    """Multi-head attention to chosen blocks; see `attention_jax.subquadratic.routed_attention`.

    Other arguments are as in `LinearAttention`.

    Args:
        block_size: Of queries and keys; None is 64.
        num_blocks: How many blocks of keys each block of queries chooses.

    References:
        Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189.
    """

    num_blocks: int = 4

    def __post_init__(self) -> None:
        check_count("num_blocks", self.num_blocks, 1)
        if self.block_size is not None:
            check_count("block_size", self.block_size, 1)
        super().__post_init__()

    @nn.nowrap
    def _has_none_of(self) -> tuple[str, ...]:
        return ()

    @nn.nowrap
    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"block_size": self.block_size or 64, "num_blocks": self.num_blocks}
        return subquadratic.routed_attention(query, key, value, mask=mask, **sizes)
