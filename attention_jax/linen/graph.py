"""Graph attention: a node looks at its neighbours, with a score that depends on both."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import AnyBias, AnyMask, Features, check_choice, check_width
from attention_jax._modules.flags import Flag
from attention_jax._modules.graph import GraphScore, neighbours
from attention_jax._modules.recipes import BIAS_INIT, Initializer, Sizes
from attention_jax._modules.shield import answered, calm, loud, shielded
from attention_jax.heads import merge_heads
from attention_jax.linen.base import AttentionLayer
from attention_jax.linen.projection import Projection
from attention_jax.linen.scores import ScoreParameters
from attention_jax.scores import Score


class GraphAttention(AttentionLayer):
    """Graph attention with a dynamic score (GATv2), a node's neighbours being what a mask says.

        e_n(i, j) = v_n · LeakyReLU(W_n^target x_i + W_n^source x_j) + bias(i, j)
        out_i = ‖_n Σ_j softmax_j(e_n(i, j) where j is a neighbour of i) W_n^source x_j + b

    The plane [T, S, A] that this score takes elsewhere is never built.

    Args:
        in_features: D, width of a node's features.
        head_features: A, what each head gives.
        num_heads: N.
        join: "concat" puts the heads side by side, `[*B, T, N·A]`; "mean" averages them,
            `[*B, T, A]`, as the paper's last layer does.
        self_loops: Whether every node is a neighbour of itself.
        negative_slope: Of LeakyReLU, at least 0.
        bias_init: Initialiser of the output's bias.
        use_bias: Whether the output has a bias.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels and of v.
        mask: A mask object or boolean array that holds in every call, besides the neighbours.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import GraphAttention
        >>> layer, nodes = GraphAttention(5, 3, num_heads=2), jnp.ones((4, 5))
        >>> ring = jnp.roll(jnp.eye(4, dtype=bool), 1, axis=1)
        >>> layer.apply(layer.init(jax.random.key(0), nodes), nodes, ring).shape
        (4, 6)

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

    def __post_init__(self) -> None:
        for name in ("in_features", "num_heads", "head_features"):
            check_count(name, getattr(self, name), 1)
        check_choice("join", self.join, "concat", "mean")
        if not self.negative_slope >= 0:
            raise ValueError(f"negative_slope must be at least 0, got {self.negative_slope}")
        super().__post_init__()

    def setup(self) -> None:
        """The projections, the score and the bias."""
        options = {
            "use_bias": False,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
            "kernel_init": self.kernel_init,
        }
        self.source = Projection(**options)
        self.target = Projection(**options)
        recipe = GraphScore(float(self.negative_slope))
        self.score = ScoreParameters(score=recipe, dtype=self.dtype)
        if self.use_bias:
            heads = self.num_heads if self.join == "concat" else 1
            width = (heads * self.head_features,)
            self.bias = self.param("bias", self.bias_init, width, self.param_dtype)

    def __call__(
        self,
        x: Features,
        adjacency: AnyMask = None,
        *,
        edge_bias: AnyBias = None,
        deterministic: Flag = None,
        dropout_rng: Any = None,
    ) -> Float[Array, "*B T out"]:
        """Each node's look at its neighbours.

        Args:
            x: Nodes `[*B, T, in_features]`.
            adjacency: Who is whose neighbour: a boolean array `[T, T]` or `[*B, T, T]`, True at
                [i, j] where i sees j; one with a head axis, `[*B, #N, T, T]`; or a mask object,
                such as `masks.segments(graph_ids)` for complete graphs packed together. None is
                everyone.
            edge_bias: Added to the scores: an array `[*#B, #N, T, T]` or a bias object.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".

        Returns:
            `[*B, T, N·A]` or `[*B, T, A]`; the bias for a node without neighbours.
        """
        query, key, score = self._both(x)
        result = self._run(
            query,
            key,
            key,
            score=score,
            mask=neighbours(adjacency, x.ndim, self.self_loops),
            bias=edge_bias,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
        )
        out = merge_heads(result.out) if self.join == "concat" else jnp.mean(result.out, axis=-2)
        if self.use_bias:
            bias = jnp.asarray(self.bias).astype(out.dtype)
            out = out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)
        return answered(out, result.out, x)

    def attention_weights(
        self, x: Features, adjacency: AnyMask = None, *, edge_bias: AnyBias = None
    ) -> Float[Array, "*B N T T"]:
        """The weights, before dropout.

        Args:
            x: As in the call.
            adjacency: As in the call.
            edge_bias: As in the call.
        """
        query, key, score = self._both(x)
        mask = neighbours(adjacency, x.ndim, self.self_loops)
        return self._weights(loud(query, x), key, score=score, mask=mask, bias=edge_bias)

    def _both(self, x: Any) -> tuple[Array, Array, Score]:
        """What a node is as one that looks, and as one that is looked at; and the score."""
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        heads = (self.num_heads, self.head_features)
        query = calm(lambda x: self.target(x, heads), x)
        key = shielded(lambda x: self.source(x, heads), x)
        sizes = Sizes(*heads, self.head_features, self.param_dtype, self.kernel_init)
        return query, key, self.score(sizes)
