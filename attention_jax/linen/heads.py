"""From features to heads and back: what multi-head attention is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array, check_count
from attention_jax._modules import places
from attention_jax._modules.arguments import check_width, head_depth
from attention_jax._modules.fused import Projected, fused_product, split_parts
from attention_jax._modules.recipes import BIAS_INIT, Initializer, Sizes
from attention_jax._modules.shield import calm, loud, shielded
from attention_jax.cache import KVCache
from attention_jax.kernels.request import Result
from attention_jax.linen.caching import CachedAttention
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.projection import Projection
from attention_jax.linen.scores import (
    AnyPositions,
    AnyScore,
    PositionParameters,
    ScoreParameters,
    check_score,
)
from attention_jax.scores import Score


class ProjectedAttention(CachedAttention):
    """A cached attention whose queries, keys and values are linear in its inputs."""

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
    positions: AnyPositions = None
    value_features: int | None = None
    fused_qkv: bool = False
    force_fp32_for_softmax: bool = False

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads, 1)
        widths = ("in_features", "qkv_features", "out_features", "in_kv_features", "value_features")
        for name in widths:
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        self._check_heads()
        check_score(self.score)
        places.recipe(self.positions)
        super().__post_init__()

    @nn.nowrap
    def _check_heads(self) -> None:
        known = self.in_features if self.qkv_features is None else self.qkv_features
        if known is None:
            head_depth(self.num_heads, self.num_heads, self._kv_heads())
        else:
            places.recipe(self.positions).check(self._sizes(known))
        if self.value_features is not None and self.value_features % self.num_heads:
            raise ValueError(
                f"value_features {self.value_features} must be a multiple of "
                f"num_heads {self.num_heads} (N)"
            )
        if self.fused_qkv and self.in_kv_features not in (None, self.in_features):
            raise ValueError(
                f"fused_qkv needs one input for queries, keys and values, but in_features is "
                f"{self.in_features} and in_kv_features {self.in_kv_features}"
            )

    def setup(self) -> None:
        """The parts, under Flax's names."""
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        options = {"use_bias": self.use_bias, "precision": self.precision, **dtypes}
        inits = {"kernel_init": self.kernel_init, "bias_init": self.bias_init}
        self.query = Projection(**inits, **options)
        self.key = Projection(**inits, **options)
        self.value = Projection(**inits, **options)
        self.query_ln = LayerNorm(use_bias=False, **dtypes) if self.normalize_qk else None
        self.key_ln = LayerNorm(use_bias=False, **dtypes) if self.normalize_qk else None
        self.out = Projection(
            axes=2,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            **options,
        )
        given = {"kernel_init": self.kernel_init, **dtypes}
        self._matched = ScoreParameters(score=self.score, name="score", **given)
        self._placed = PositionParameters(positions=self.positions, name="positions", **given)

    @nn.nowrap
    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> KVCache:
        """An empty cache for this layer, of which `in_features` or `qkv_features` must be given.

        Args:
            batch: `*B`.
            length: How many tokens it can hold.
            dtype: What keys and values are stored in; None is the layer's, or float32 at least.
            rolling: Whether it keeps the latest tokens, for a mask with a window: `length` must be
                at least what a query sees, itself counted. `with_cache` refuses a longer window,
                and a mask without one.

        Returns:
            A cache with index 0.
        """
        width = self.in_features if self.qkv_features is None else self.qkv_features
        if width is None:
            raise ValueError("new_cache sees no inputs: give in_features or qkv_features")
        sizes = self._sizes(width)
        heads, value_depth = self._value_heads(sizes)
        return KVCache.init(
            batch,
            length,
            heads,
            sizes.key_depth,
            value_depth=value_depth,
            dtype=dtype or self.dtype or jnp.promote_types(self.param_dtype, jnp.float32),
            rolling=rolling,
        )

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array, Score]:
        """Query, key and value, the first two normalised and turned, and the score.

        Queries are calm; `answered` gives back what is not finite.
        """
        self._check(inputs_q, inputs_k, inputs_v)
        sizes = self._sizes(inputs_q.shape[-1])
        if self.fused_qkv and inputs_q is inputs_k is inputs_v and self._may_fuse():
            query, key, value = self._fused(inputs_q, sizes)
        else:
            query = calm(self._to_query(sizes), inputs_q)
            key = shielded(self._to_key(sizes), inputs_k)
            value = shielded(self._to_value(sizes), inputs_v)
        turn = self._placed.turn
        return turn(query, query_at), turn(key, key_at), value, self._score(sizes)

    def _project_query(self, inputs_q: Any, at: Any) -> tuple[Array, Score]:
        self._check(inputs_q)
        sizes = self._sizes(inputs_q.shape[-1])
        query = calm(self._to_query(sizes), inputs_q)
        return self._placed.turn(query, at), self._score(sizes)

    def _project_memory(self, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        inputs_v = inputs_k if inputs_v is None else inputs_v
        self._check(None, inputs_k, inputs_v)
        width = self.in_features if self.qkv_features is None else self.qkv_features
        if width is None:
            raise ValueError("remember sees no queries: give in_features or qkv_features")
        sizes = self._sizes(width)
        key = self._placed.turn(shielded(self._to_key(sizes), inputs_k), None)
        return key, shielded(self._to_value(sizes), inputs_v)

    def _project_out(self, out: Array, width: int) -> Array:
        return self.out(out, (width if self.out_features is None else self.out_features,))

    @nn.nowrap
    def _shared_dropout(self) -> bool:
        return self.broadcast_dropout

    @nn.nowrap
    def _kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @nn.nowrap
    def _sizes(self, width: int) -> Sizes:
        """The sizes of a head, for inputs of that width."""
        features = width if self.qkv_features is None else self.qkv_features
        depth = head_depth(features, self.num_heads, self._kv_heads())
        return Sizes(self.num_heads, depth, depth)

    @nn.nowrap
    def _check(self, inputs_q: Any, inputs_k: Any = None, inputs_v: Any = None) -> None:
        kv_features = self.in_features if self.in_kv_features is None else self.in_kv_features
        for name, x, features, letters in (
            ("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]"),
            ("inputs_k", inputs_k, kv_features, "[*B, S, in_kv_features]"),
            ("inputs_v", inputs_v, kv_features, "[*B, S, in_kv_features]"),
        ):
            if x is not None:
                shape = np.shape(as_array(name, x))
                comes = shape[-1] if shape else 0
                check_width(name, x, comes if features is None else features, letters)

    @nn.nowrap
    def _value_heads(self, sizes: Sizes) -> tuple[int, int]:
        width = self.value_features
        depth = sizes.query_depth if width is None else width // self.num_heads
        return self._kv_heads(), depth

    @nn.nowrap
    def _to_query(self, sizes: Sizes) -> Callable[[Array], Array]:
        return self._normed(self.query, self.query_ln, (self.num_heads, sizes.query_depth))

    @nn.nowrap
    def _to_key(self, sizes: Sizes) -> Callable[[Array], Array]:
        return self._normed(self.key, self.key_ln, (self._kv_heads(), sizes.key_depth))

    @nn.nowrap
    def _to_value(self, sizes: Sizes) -> Callable[[Array], Array]:
        return self._normed(self.value, None, self._value_heads(sizes))

    @nn.nowrap
    def _normed(
        self,
        projection: Callable[..., Array],
        norm: Callable[[Array], Array] | None,
        heads: tuple[int, int],
        *known: Projected,
    ) -> Callable[[Array], Array]:
        if norm is None:
            return lambda x: projection(x, heads, *known)
        return lambda x: norm(projection(x, heads, *known))

    @nn.nowrap
    def _may_fuse(self) -> bool:
        """Whether the projections are those of `setup`, so that one product is all of them."""
        ours = (1, self.use_bias, self.dtype, self.precision)
        return not self.is_initializing() and all(
            type(part) is Projection
            and (part.axes, part.use_bias, part.dtype, part.precision) == ours
            for part in (self.query, self.key, self.value)
        )

    @nn.nowrap
    def _fused(self, x: Any, sizes: Sizes) -> tuple[Array, Array, Array]:
        """All three in one matrix product with their kernels side by side.

        Each projection is called all the same, with its part of the product, so that interceptors
        and captured intermediates see it.
        """
        depth, inputs = sizes.query_depth, (x.shape[-1],)
        parts = [
            (self.query, self.query_ln, (self.num_heads, depth)),
            (self.key, self.key_ln, (self._kv_heads(), depth)),
            (self.value, None, self._value_heads(sizes)),
        ]
        parameters = [part.parameters(inputs, heads) for part, _, heads in parts]
        kernels, biases = [kernel for kernel, _ in parameters], [bias for _, bias in parameters]
        x, given = calm(lambda x: x, x), x
        joined = fused_product(x, kernels, biases, dtype=self.dtype, precision=self.precision)
        every = split_parts(joined, [heads for _, _, heads in parts])
        query, key, value = (
            self._normed(*part, Projected(x, y))(x) for part, y in zip(parts, every, strict=True)
        )
        return query, loud(key, given), loud(value, given)

    @nn.nowrap
    def _adapt(self, inputs_q: Any) -> Callable[[Result], None] | None:
        """What takes note of a training call; None where the score has no states."""
        if not self._matched.adapts:
            return None
        sizes = self._sizes(inputs_q.shape[-1])
        return lambda result: self._matched.adapt(sizes, result)

    def _score(self, sizes: Sizes) -> Score:
        """The score, and what the position scheme adds to it."""
        score, added = self._matched(sizes), self._placed(sizes)
        return score if added is None else score + added
