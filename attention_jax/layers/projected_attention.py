"""The input and output projections of multi-head attention."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Batch
from attention_jax._core.checks import as_array
from attention_jax.cache import KVCache
from attention_jax.layers import position_recipes
from attention_jax.layers.arguments import check_width, head_depth
from attention_jax.layers.attending import AttentionLayer
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.fused_projections import Projected, fused_product, split_parts
from attention_jax.layers.nonfinite import propagate_nan, zero_filled
from attention_jax.layers.position_recipes import AnyPositions
from attention_jax.layers.recipes import BIAS_INIT, AnyScore, Initializer, Sizes, check_score
from attention_jax.scores import Score


@settings
class ProjectedAttention(AttentionLayer):
    """Base of multi-head attention with linear projections of queries, keys and values.

    Args:
        num_heads: N, the number of query heads.
        in_features: Width of `inputs_q`.
        qkv_features: D, the width of all heads together, a multiple of N; None is that of
            `inputs_q`.
        out_features: Width of the output; None is that of `inputs_q`.
        num_kv_heads: K, the number of key/value heads, of which N is a multiple; None is N. Query
            head n uses key/value head n // (N // K).
        in_kv_features: Width of `inputs_k` and `inputs_v`; None is `in_features`.
        broadcast_dropout: One dropout mask `[T, S]` for all batch entries and heads.
        kernel_init: Initialiser of the kernels, and of the score's.
        out_kernel_init: Initialiser of the output kernel; None is `kernel_init`.
        out_bias_init: Initialiser of the output bias; None is `bias_init`.
        normalize_qk: Whether to apply LayerNorms without bias to queries and keys.
        positions: A position scheme: a recipe such as `rotary()`, a name ("rotary", "alibi",
            "relative_bias", "shaw"), or a bias object, whose float arrays become parameters; None
            is no scheme.
        value_features: The width of the values of all heads together, a multiple of N; None is
            `qkv_features`.
        fused_qkv: Whether self-attention computes queries, keys and values in one matrix product.
            Parameters and results are the same. Replaced projections, such as adapters or quantised
            layers, are called separately.
        force_fp32_for_softmax: Whether weights, sown or returned, are at least float32 instead of
            the queries' dtype. The softmax always is.
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
    normalize_qk: bool = False
    score: AnyScore = None
    positions: AnyPositions = None
    value_features: int | None = None
    fused_qkv: bool = False
    force_fp32_for_softmax: bool = False

    _counts = (
        *("num_heads", "num_kv_heads", "in_features", "qkv_features", "out_features"),
        *("in_kv_features", "value_features"),
    )
    _arguments: ClassVar[Mapping[str, str]] = {
        **AttentionLayer._arguments,
        "inputs_q": "`[*B, T, in_features]`.",
        "query_positions": "ints `[T]` or `[*B, T]`, 0..T-1 by default.",
    }

    def _check(self, given: Any) -> None:
        super()._check(given)
        kv_heads = given.num_kv_heads or given.num_heads
        known = given.qkv_features or given.in_features
        depth = head_depth(known or given.num_heads, given.num_heads, kv_heads)
        check_score(given.score)
        recipe = position_recipes.recipe(given.positions)
        if known is not None:
            recipe.check(Sizes(given.num_heads, depth, depth))
        if given.value_features is not None and given.value_features % given.num_heads:
            raise ValueError(
                f"value_features {given.value_features} must be a multiple of "
                f"num_heads {given.num_heads} (N)"
            )
        if given.fused_qkv and given.in_kv_features not in (None, given.in_features):
            raise ValueError(
                f"fused_qkv needs one input for queries, keys and values, but in_features is "
                f"{given.in_features} and in_kv_features {given.in_kv_features}"
            )

    def _build(self, make: Construction) -> None:
        width = self.in_features
        known = (self.qkv_features or width) is not None
        query, key, value = self._heads(width) if known else (None, None, None)
        states = self.in_kv_features or width
        self.query = make.projection(width, query)
        self.key = make.projection(states, key)
        self.value = make.projection(states, value)
        depth = None if query is None else query[1]
        self.query_ln, self.key_ln = (
            make.layer_norm(depth, use_bias=False, name=name) if self.normalize_qk else None
            for name in ("query_ln", "key_ln")
        )
        attended = None if value is None else (self.num_heads, value[1])
        out = None if width is None else (self.out_features or width,)
        self.out = make.projection(attended, out, axes=2, output=True)
        make.dropout_stream(self.dropout_rate)
        make.score(make.given.score, self.num_heads, depth, depth)
        make.positions(make.given.positions, self.num_heads, depth)

    def _heads(self, width: int | None) -> tuple[tuple[int, int], ...]:
        """Heads and depth of queries, keys and values, given the width of the queries' inputs.

        Raises:
            ValueError: If neither the width nor the setting is given.
        """
        features = self.qkv_features or width or self.in_features
        if features is None:
            raise ValueError("without inputs_q give in_features or qkv_features")
        kv_heads = self.num_kv_heads or self.num_heads
        depth = head_depth(features, self.num_heads, kv_heads)
        value_depth = self.value_features // self.num_heads if self.value_features else depth
        return (self.num_heads, depth), (kv_heads, depth), (kv_heads, value_depth)

    def new_cache(
        self, batch: Batch, length: int, *, dtype: Any = None, rolling: bool = False
    ) -> KVCache:
        """An empty cache for this layer.

        Args:
            batch: `*B`.
            length: The number of tokens that it can hold.
            dtype: The storage dtype of keys and values; None is the layer's, or at least float32.
            rolling: Whether it keeps only the latest tokens, for a mask with a window: `length`
                must be at least the number of keys visible to a query, including its own.
                `with_cache` raises for a longer window or a mask without one.

        Returns:
            A cache with index 0.
        """
        _, (heads, depth), (_, value_depth) = self._heads(None)
        dtype = dtype or self.dtype or jnp.promote_types(self.param_dtype, jnp.float32)
        options = {"value_depth": value_depth, "dtype": dtype, "rolling": rolling}
        return KVCache.init(batch, length, heads, depth, **options)

    def _project(
        self, inputs_q: Any, inputs_k: Any, inputs_v: Any, query_at: Any, key_at: Any
    ) -> tuple[Array, Array, Array]:
        """Query, key and value, the first two normalised and rotated if the layer does so.

        Queries are projected from zero-filled inputs; `propagate_nan_of_queries` restores NaN.
        """
        self._check_inputs(inputs_q, inputs_k, inputs_v)
        heads, x, known = self._heads(inputs_q.shape[-1]), zero_filled(inputs_q), (None, None, None)
        if self.fused_qkv and inputs_q is inputs_k is inputs_v:
            known = self._fused(x, heads)
        query = self._query(x, heads, known[0])
        states = x if inputs_k is inputs_q else zero_filled(inputs_k)
        values = states if inputs_v is inputs_k else zero_filled(inputs_v)
        key = propagate_nan(self._key(states, heads, known[1]), inputs_k)
        value = propagate_nan(self._linear(self.value, values, heads[2], known[2]), inputs_v)
        rotate = self._part("positions").rotate
        return rotate(query, query_at), rotate(key, key_at), value

    def _project_query(self, inputs_q: Any, at: Any) -> Array:
        self._check_inputs(inputs_q)
        query = self._query(zero_filled(inputs_q), self._heads(inputs_q.shape[-1]))
        return self._part("positions").rotate(query, at)

    def _project_memory(self, inputs_k: Any, inputs_v: Any) -> tuple[Array, Array]:
        inputs_v = inputs_k if inputs_v is None else inputs_v
        self._check_inputs(None, inputs_k, inputs_v)
        heads, states = self._heads(None), zero_filled(inputs_k)
        values = states if inputs_v is inputs_k else zero_filled(inputs_v)
        key = self._part("positions").rotate(
            propagate_nan(self._key(states, heads), inputs_k), None
        )
        return key, propagate_nan(self._linear(self.value, values, heads[2]), inputs_v)

    def _project_out(self, out: Array, width: int) -> Array:
        """The output projection; `width` is that of the queries' inputs."""
        return self._linear(self.out, out, (self.out_features or width,))

    def _query(self, x: Array, heads: Any, known: Any = None) -> Array:
        return _normed(self._linear(self.query, x, heads[0], known), self.query_ln)

    def _key(self, x: Array, heads: Any, known: Any = None) -> Array:
        return _normed(self._linear(self.key, x, heads[1], known), self.key_ln)

    def _fused(self, x: Array, heads: Any) -> Sequence[Any]:
        """Outputs of the three projections, from one product with the concatenated kernels.

        Each projection is still called, with its part of the product, so that interceptors and
        captured intermediates include it.
        """
        arrays = self._kernels((self.query, self.key, self.value), x.shape[-1:], heads)
        if arrays is None:
            return None, None, None
        kernels, biases = zip(*arrays, strict=True)
        joined = fused_product(x, kernels, biases, dtype=self.dtype, precision=self.precision)
        return [Projected(x, y) for y in split_parts(joined, [k.shape[1:] for k in kernels])]

    def _check_inputs(self, inputs_q: Any, inputs_k: Any = None, inputs_v: Any = None) -> None:
        states = self.in_kv_features or self.in_features
        for name, x, features, letters in (
            ("inputs_q", inputs_q, self.in_features, "[*B, T, in_features]"),
            ("inputs_k", inputs_k, states, "[*B, S, in_kv_features]"),
            ("inputs_v", inputs_v, states, "[*B, S, in_kv_features]"),
        ):
            if x is not None:
                shape = np.shape(as_array(name, x))
                present = shape[-1] if shape else 0
                check_width(name, x, present if features is None else features, letters)

    def _score(self, query: Array, key: Array) -> Score:
        """The score, and the bias of the position scheme."""
        score, added = super()._score(query, key), self._part("positions")(Sizes.of(query, key))
        return score if added is None else score + added


def _normed(x: Array, norm: Any) -> Array:
    return x if norm is None else norm(x)
