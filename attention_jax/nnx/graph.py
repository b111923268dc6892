"""Graph attention: a node looks at its neighbours, with a score that depends on both."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    Features,
    check_choice,
    check_width,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.graph import GraphScore as GraphScore
from attention_jax._modules.graph import neighbours
from attention_jax._modules.recipes import (
    BIAS_INIT,
    KERNEL_INIT,
    Initializer,
    Sizes,
)
from attention_jax._modules.settings import check_settings
from attention_jax._modules.shield import answered, calm, loud, shielded
from attention_jax.heads import merge_heads
from attention_jax.nnx.base import AttentionLayer
from attention_jax.nnx.randomness import AnyRngs, check_rngs
from attention_jax.nnx.scores import ScoreParameters


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
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels and of v.
        bias_init: Initialiser of the output's bias.
        use_bias: Whether the output has a bias.
        mask: A mask object or boolean array that holds in every call, besides the neighbours.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
        rngs: Streams for the parameters and, with a rate, "dropout".

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import GraphAttention
        >>> layer = GraphAttention(5, 3, num_heads=2, rngs=nnx.Rngs(0))
        >>> ring = jnp.roll(jnp.eye(4, dtype=bool), 1, axis=1)
        >>> layer(jnp.ones((4, 5)), ring).shape
        (4, 6)

    References:
        Brody, Alon, Yahav 2022, "How Attentive are Graph Attention Networks?", arXiv:2105.14491,
        eq. 7. Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903, eq. 5-6.
    """

    def __init__(
        self,
        in_features: int,
        head_features: int,
        num_heads: int = 1,
        *,
        join: str = "concat",
        self_loops: bool = True,
        negative_slope: float | int = 0.2,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        dropout_rate: float | int = 0.0,
        deterministic: Flag = None,
        precision: Any = None,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        use_bias: bool = True,
        mask: AnyMask = None,
        implementation: str | tuple[str, ...] | None = None,
        block_size: int | tuple[int, int] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        check_rngs(type(self).__name__, rngs)
        flags = {"self_loops": self_loops, "use_bias": use_bias}
        inits = {"kernel_init": kernel_init, "bias_init": bias_init}
        check_settings(dtype=dtype, param_dtype=param_dtype, precision=precision, **flags, **inits)
        self.in_features = check_count("in_features", in_features, 1)
        heads = (
            check_count("num_heads", num_heads, 1),
            check_count("head_features", head_features, 1),
        )
        self.join = check_choice("join", join, "concat", "mean")
        self.self_loops = self_loops
        if not negative_slope >= 0:
            raise ValueError(f"negative_slope must be at least 0, got {negative_slope}")
        options = {
            "use_bias": False,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "rngs": rngs,
        }
        self.source = nnx.LinearGeneral(in_features, heads, **options)
        self.target = nnx.LinearGeneral(in_features, heads, **options)
        width = num_heads * head_features if join == "concat" else head_features
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (width,), param_dtype))
        self._settle(
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            implementation=implementation,
            block_size=block_size,
            rngs=rngs,
        )
        sizes = Sizes(num_heads, head_features, head_features, param_dtype, kernel_init)
        recipe = GraphScore(float(negative_slope))
        self.score = ScoreParameters(recipe, sizes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Features,
        adjacency: AnyMask = None,
        *,
        edge_bias: AnyBias = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
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
            rngs: Where the dropout key comes from; wins over the layer's own stream.

        Returns:
            `[*B, T, N·A]` or `[*B, T, A]`; the bias for a node without neighbours.
        """
        query, key = self._both(x)
        result = self._run(
            query,
            key,
            key,
            mask=neighbours(adjacency, x.ndim, self.self_loops),
            bias=edge_bias,
            deterministic=deterministic,
            rngs=rngs,
        )
        out = merge_heads(result.out) if self.join == "concat" else jnp.mean(result.out, axis=-2)
        if self.bias is not None:
            bias = jnp.asarray(self.bias[...]).astype(out.dtype)
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
        query, key = self._both(x)
        mask = neighbours(adjacency, x.ndim, self.self_loops)
        return self._weights(loud(query, x), key, mask=mask, bias=edge_bias)

    def _both(self, x: Any) -> tuple[Array, Array]:
        """What a node is as one that looks, and as one that is looked at."""
        check_width("x", x, self.in_features, "[*B, T, in_features]")
        return calm(self.target, x), shielded(self.source, x)
