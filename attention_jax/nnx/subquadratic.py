"""Multi-head attention by the families of `attention_jax.subquadratic`, with the same projections.

    TransformerEncoderLayer(8, 64, 256, attention=LinearAttention, rngs=rngs)

Each is `MultiHeadAttention` with another way from queries, keys and values to the output. What a
family has no place for (a score, a bias, dropout of weights, a cache) is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax import masks, subquadratic
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import precision_of_products
from attention_jax._modules.arguments import AnyBias, AnyMask, QueryInputs, combine
from attention_jax._modules.recipes import KERNEL_INIT, drawn
from attention_jax._modules.shield import shielded
from attention_jax.kernels.request import Result
from attention_jax.masks.mask import Mask
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.subquadratic import LinearState
from attention_jax.subquadratic.features import Features, as_feature_map


class FamilyAttention(MultiHeadAttention):
    """What the modules of this file share: projections from `MultiHeadAttention`, and refusals."""

    def __init__(
        self, num_heads: int, in_features: int, *widths: Any, rngs: nnx.Rngs, **options: Any
    ) -> None:
        name = type(self).__name__
        for option in ("score", "implementation", "block_size", "decode", "dropout_rate"):
            if options.get(option):
                raise ValueError(f"{name} has no {option}, got {option}={options[option]!r}")
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        if self.positions is not None and self.positions.bias() is not None:
            raise ValueError(
                f"{name} has no scores to add a bias to: positions may turn queries and keys, as "
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
        bias: AnyBias,
        deterministic: Any,
        rngs: Any,
        statistics: bool = False,
        **positions: Any,
    ) -> Result:
        name = type(self).__name__
        if bias is not None:
            raise ValueError(f"{name} has no scores to add a bias to")
        if statistics:
            raise NotImplementedError(f"{name} forms no rows of weights: it has no statistics")
        if any(at is not None for at in positions.values()):
            raise NotImplementedError(f"{name} goes by array index: it takes no positions or cache")
        with precision_of_products(self.precision):
            return Result(self._attend(query, key, value, combine(self.mask, mask)))

    def _weights(self, query: Array, key: Array, **options: Any) -> Array:
        raise NotImplementedError(f"{type(self).__name__} forms no rows of weights to return")


class LinearAttention(FamilyAttention):
    """Multi-head linear attention; see `attention_jax.subquadratic.linear_attention`.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`.
        feature_map: φ; None is `elu_features()`. Arrays in it, such as random features, do not
            train; assign `layer.feature_map.redraw(key)` to draw them anew.
        chunk_size: Tokens in a chunk; None picks.
        rngs: A stream for the parameters.
        **options: As in `MultiHeadAttention`, but for `score, implementation, block_size, decode,
            dropout_rate`. The mask may be causal order and padding.

    Raises:
        ValueError: If an option has no place here, or as in `MultiHeadAttention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import LinearAttention
        >>> layer = LinearAttention(4, 16, mask=aj.masks.causal(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 7, 16))).shape
        (2, 7, 16)

    References:
        Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236, eq. 5.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        feature_map: Features = None,
        chunk_size: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        self.feature_map = nnx.data(as_feature_map(feature_map))
        self.feature_map.check(self.head_dim, 0)
        self.chunk_size = None if chunk_size is None else check_count("chunk_size", chunk_size, 1)

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
        query, key, value = self._project(inputs, inputs, inputs, at, at)
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


class LowRankAttention(FamilyAttention):
    """Multi-head Linformer; see `attention_jax.subquadratic.low_rank_attention`.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`.
        length: The greatest length of keys and values; shorter ones use the first columns.
        rank: M, how many rows keys and values are projected to.
        share_projections: Whether values use the keys' projection.
        rngs: A stream for the parameters.
        **options: As in `LinearAttention`; the mask may be padding.

    Raises:
        ValueError: If an option has no place here, or as in `MultiHeadAttention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import LowRankAttention
        >>> layer = LowRankAttention(4, 16, length=32, rank=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 20, 16))).shape
        (2, 20, 16)

    References:
        Wang et al. 2020, "Linformer", arXiv:2006.04768, eq. 7.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        length: int,
        rank: int,
        share_projections: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        self.length = check_count("length", length, 1)
        shape = (check_count("rank", rank, 1), self.length)
        init = options.get("kernel_init", KERNEL_INIT)
        drawing = (shape, self.param_dtype)
        self.key_projection = nnx.Param(drawn(init, rngs.params(), *drawing))
        self.value_projection: nnx.Param | None = nnx.data(None)
        if not share_projections:
            self.value_projection = nnx.Param(drawn(init, rngs.params(), *drawing))

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        S = key.shape[-3]
        if S > self.length:
            raise ValueError(f"keys have length {S}, but the layer was made for {self.length}")
        down_key = self.key_projection[...][:, :S]
        down_value = None if self.value_projection is None else self.value_projection[...][:, :S]
        return subquadratic.low_rank_attention(query, key, value, down_key, down_value, mask=mask)


class NystromAttention(FamilyAttention):
    """Multi-head Nyström attention; see `attention_jax.subquadratic.nystrom_attention`.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`.
        num_landmarks: M, how many.
        iterations: Of the pseudo-inverse.
        rngs: A stream for the parameters.
        **options: As in `LinearAttention`; the mask may be padding.

    References:
        Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        num_landmarks: int = 64,
        iterations: int = 6,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        self.num_landmarks = check_count("num_landmarks", num_landmarks, 1)
        self.iterations = check_count("iterations", iterations, 1)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"num_landmarks": self.num_landmarks, "iterations": self.iterations}
        return subquadratic.nystrom_attention(query, key, value, mask=mask, **sizes)


class MemoryCompressedAttention(FamilyAttention):
    """Multi-head attention to compressed keys and values.

    See `attention_jax.subquadratic.memory_compressed_attention`.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`.
        stride: How many keys become one.
        convolution: Whether by a convolution with parameters of its own, or by the mean.
        rngs: A stream for the parameters.
        **options: As in `LinearAttention`.

    References:
        Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198,
        §4.2.3.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        stride: int = 3,
        convolution: bool = True,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        self.stride = check_count("stride", stride, 1)
        self.key_kernel: nnx.Param | None = nnx.data(None)
        self.value_kernel: nnx.Param | None = nnx.data(None)
        if convolution:
            init = options.get("kernel_init", KERNEL_INIT)

            def kernel(size: int) -> nnx.Param:
                flat = drawn(init, rngs.params(), (stride * size, size), self.param_dtype)
                return nnx.Param(flat.reshape(stride, size, size))

            self.key_kernel, self.value_kernel = kernel(self.head_dim), kernel(self.value_dim)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        kernels = {}
        if self.key_kernel is not None and self.value_kernel is not None:
            kernels = {
                "key_kernel": self.key_kernel[...],
                "value_kernel": self.value_kernel[...],
            }
        return subquadratic.memory_compressed_attention(
            query, key, value, self.stride, mask=mask, **kernels
        )


class Hash(nnx.Variable):
    """The key of a random hash; it does not train."""


class LSHAttention(FamilyAttention):
    """Multi-head Reformer self-attention; see `attention_jax.subquadratic.lsh_attention`.

    Queries are keys as well, so there is no projection to keys. The hash is drawn once, from the
    parameters' stream; assign another key to `layer.hash_key` to hash anew.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`; K is of the values.
        num_buckets: See `lsh_attention`.
        num_rounds: See `lsh_attention`.
        window: See `lsh_attention`.
        rngs: A stream for the parameters.
        **options: As in `LinearAttention`, without `fused_qkv`.

    References:
        Kitaev et al. 2020, "Reformer", arXiv:2001.04451, §2.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        num_buckets: int | tuple[int, ...] | None = None,
        num_rounds: int = 1,
        window: int | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if options.get("fused_qkv"):
            raise ValueError("LSHAttention has no fused_qkv: its queries are its keys")
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        del self.key
        self.key_ln = nnx.data(None)
        self.num_buckets = num_buckets
        self.num_rounds = check_count("num_rounds", num_rounds, 1)
        self.window = None if window is None else check_count("window", window, 1)
        self.hash_key = Hash(jax.random.key_data(rngs.params()))

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array]:
        if inputs_k is not inputs_q:
            raise ValueError("LSHAttention is self-attention: its keys are made of inputs_q alone")
        self._check(inputs_q, inputs_k, inputs_v)
        assert self.positions is not None  # a layer with projections has a scheme, if an empty one
        query = self.positions.turn(shielded(self._to_query, inputs_q), query_at)
        return query, query, shielded(self.value, inputs_v)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        hash_key = jax.random.wrap_key_data(self.hash_key[...])
        sizes = {"num_buckets": self.num_buckets, "num_rounds": self.num_rounds}
        return subquadratic.lsh_attention(
            query, value, hash_key, window=self.window, mask=mask, **sizes
        )


class RoutedAttention(FamilyAttention):
    """Multi-head attention to chosen blocks; see `attention_jax.subquadratic.routed_attention`.

    Args:
        num_heads: N, as in `MultiHeadAttention`, and so are the next five.
        in_features: See `MultiHeadAttention`.
        *widths: `qkv_features, out_features, num_kv_heads, in_kv_features`.
        block_size: Of queries and keys.
        num_blocks: How many blocks of keys each block of queries chooses.
        rngs: A stream for the parameters.
        **options: As in `LinearAttention`.

    References:
        Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv:2502.13189.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *widths: Any,
        block_size: int = 64,
        num_blocks: int = 4,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, in_features, *widths, rngs=rngs, **options)
        self.block_size = check_count("block_size", block_size, 1)
        self.num_blocks = check_count("num_blocks", num_blocks, 1)

    def _attend(self, query: Array, key: Array, value: Array, mask: Mask | None) -> Array:
        sizes = {"block_size": self.block_size, "num_blocks": self.num_blocks}
        return subquadratic.routed_attention(query, key, value, mask=mask, **sizes)
