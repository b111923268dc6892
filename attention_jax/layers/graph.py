"""Graph attention: a mask gives each node's neighbours, and the score depends on both nodes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_number
from attention_jax.heads import merge_heads
from attention_jax.layers.arguments import AnyBias, AnyMask, Features, check_choice, check_width
from attention_jax.layers.attending import AttentionLayer
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.graph_score import GraphScore, neighbours
from attention_jax.layers.nonfinite import (
    nan_propagating,
    propagate_nan,
    propagate_nan_of_queries,
    zero_filled,
)
from attention_jax.layers.recipes import BIAS_INIT, Initializer
from attention_jax.layers.training import Flag


@settings
class GraphAttention(AttentionLayer):
    """Graph attention with a dynamic score (GATv2); the neighbours of a node are given by a mask.

        e_n(i, j) = v_n · LeakyReLU(W_n^target x_i + W_n^source x_j) + bias(i, j)
        out_i = ‖_n Σ_j softmax_j(e_n(i, j) where j is a neighbour of i) W_n^source x_j + b

    The `[T, S, A]` tensor of the usual implementation is never built.

    Args:
        in_features: D, width of a node's features.
        head_features: A, output width of one head.
        num_heads: N.
        join: "concat" concatenates the heads, `[*B, T, N·A]`; "mean" averages them, `[*B, T, A]`,
            as the paper's last layer does.
        self_loops: Whether every node is a neighbour of itself.
        negative_slope: Of LeakyReLU, at least 0.
        kernel_init: Initialiser of the kernels and of v.
        bias_init: Initialiser of the output's bias.
        use_bias: Whether the output has a bias.
        mask: A mask object or boolean array for every call, combined with the neighbours.

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

    References:
        Brody, Alon, Yahav 2022, "How Attentive are Graph Attention Networks?", arXiv:2105.14491,
        eq. 7. Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903, eq. 5-6.
    """

    in_features: int
    head_features: int
    num_heads: int = 1
    _: dataclasses.KW_ONLY
    join: str = "concat"
    self_loops: bool = True
    negative_slope: float | int = 0.2
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True

    _counts = ("in_features", "num_heads", "head_features")

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_choice("join", given.join, "concat", "mean")
        if not check_number("negative_slope", given.negative_slope) >= 0:
            raise ValueError(f"negative_slope must be at least 0, got {given.negative_slope}")

    def _build(self, make: Construction) -> None:
        heads, depth = (self.num_heads, self.head_features), self.head_features
        self.source = make.projection(self.in_features, heads, use_bias=False)
        self.target = make.projection(self.in_features, heads, use_bias=False)
        width = self.num_heads * depth if self.join == "concat" else depth
        init, dtype = make.given.bias_init, self.param_dtype
        self.bias = (
            make.param("bias", lambda key: init(key, (width,), dtype)) if self.use_bias else None
        )
        make.dropout_stream(self.dropout_rate)
        make.score(GraphScore(float(self.negative_slope)), self.num_heads, depth, depth)

    def __call__(
        self,
        x: Features,
        adjacency: AnyMask = None,
        *,
        edge_bias: AnyBias = None,
        deterministic: Flag = None,
        **random: Any,
    ) -> Float[Array, "*B T out"]:
        """The attention of each node to its neighbours.

        Args:
            x: Nodes `[*B, T, in_features]`.
            adjacency: A boolean array `[T, T]` or `[*B, T, T]`, True at [i, j] where j is a
                neighbour of i; one with a head axis, `[*B, #N, T, T]`; or a mask object, such as
                `masks.segments(graph_ids)` for several complete graphs. None makes all nodes
                neighbours.
            edge_bias: Added to the scores: an array `[*#B, #N, T, T]` or a bias object.

        Returns:
            `[*B, T, N·A]` or `[*B, T, A]`; the bias for a node without neighbours.
        """
        query, key = self._query_and_key(x)
        mask = neighbours(adjacency, x.ndim, self.self_loops)
        flags = {"deterministic": deterministic, "random": random}
        heads = self._run(query, key, key, mask=mask, bias=edge_bias, **flags).out
        out = merge_heads(heads) if self.join == "concat" else jnp.mean(heads, axis=-2)
        if self.bias is not None:
            bias = jnp.asarray(self.bias[...]).astype(out.dtype)
            out = out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)
        return propagate_nan_of_queries(out, heads, x)

    def attention_weights(
        self, x: Features, adjacency: AnyMask = None, *, edge_bias: AnyBias = None
    ) -> Float[Array, "*B N T T"]:
        """The weights, before dropout."""
        query, key = self._query_and_key(x)
        mask = neighbours(adjacency, x.ndim, self.self_loops)
        return self._weights(propagate_nan(query, x), key, mask=mask, bias=edge_bias)

    def _query_and_key(self, x: Any) -> tuple[Array, Array]:
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        heads = (self.num_heads, self.head_features)
        query = self._linear(self.target, zero_filled(x), heads)
        return query, nan_propagating(lambda x: self._linear(self.source, x, heads), x)
