"""Attention pooling: from a set of any size to a few vectors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules import recipes
from attention_jax._modules.arguments import (
    AnyMask,
    Memory,
    cast,
    check_choice,
    check_width,
    token_mask,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import (
    BIAS_INIT,
    KERNEL_INIT,
    Initializer,
    Sizes,
    drawn,
)
from attention_jax._modules.settings import check_settings
from attention_jax._modules.shield import shielded
from attention_jax.nnx.base import AttentionLayer
from attention_jax.nnx.randomness import AnyRngs, check_rngs
from attention_jax.nnx.scores import ScoreParameters


class AttentionPooling(AttentionLayer):
    """Learned queries look at a set; each gives the mean of what it looks at.

        dot:       e(i, s) = q_i · W x_s / √A
        additive:  e(i, s) = q_i · tanh(W x_s)
        gated:     e(i, s) = q_i · (tanh(W x_s) ⊙ σ(U x_s))
        out_i = Σ_s softmax_s(e(i, s)) x_s

    The states themselves are averaged, so the weights say what each contributes. The order of the
    set does not matter. In the paper of the gated form q is w, W is V, and there is one query.

    Args:
        in_features: D, width of the states and of the output.
        hidden_features: A, width in which queries and states are matched.
        num_queries: Q, how many vectors come out.
        score: "dot", "additive" or "gated".
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels and of the queries `[Q, A]`.
        bias_init: Initialiser of the biases.
        use_bias: Whether W and U have biases.
        mask: A mask object or boolean array that holds in every call.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
        rngs: Streams for the parameters and, with a rate, "dropout".

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import AttentionPooling
        >>> pool = AttentionPooling(6, 4, score="gated", rngs=nnx.Rngs(0))
        >>> bags = jnp.ones((2, 5, 6))
        >>> pool(bags, jnp.ones((2, 5), bool)).shape, pool.attention_weights(bags).shape
        ((2, 1, 6), (2, 1, 5))

    References:
        Ilse, Tomczak, Welling 2018, "Attention-based Deep Multiple Instance Learning",
        arXiv:1802.04712, eq. 8-9 (additive and gated).
        Lee et al. 2019, "Set Transformer", arXiv:1810.00825, §3.2 (learned queries).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_queries: int = 1,
        *,
        score: str = "dot",
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
        inits = {"kernel_init": kernel_init, "bias_init": bias_init}
        check_settings(
            dtype=dtype, param_dtype=param_dtype, precision=precision, use_bias=use_bias, **inits
        )
        self.in_features = check_count("in_features", in_features, 1)
        self.hidden_features = check_count("hidden_features", hidden_features, 1)
        self.num_queries = check_count("num_queries", num_queries, 1)
        self.kind = check_choice("score", score, "dot", "additive", "gated")
        self.dtype = dtype
        options = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "rngs": rngs,
        }
        self.key = nnx.Linear(in_features, hidden_features, **options)
        self.gate: nnx.Linear | None = nnx.data(None)
        if score == "gated":
            self.gate = nnx.Linear(in_features, hidden_features, **options)
        # A column of fan-in A for each query.
        shape = (hidden_features, num_queries)
        self.queries = nnx.Param(drawn(kernel_init, rngs.params(), shape, param_dtype).T)
        self._settle(
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            implementation=implementation,
            block_size=block_size,
            rngs=rngs,
        )
        recipe = recipes.ScaledDot() if score == "dot" else recipes.Dot()
        sizes = Sizes(1, hidden_features, hidden_features, param_dtype, kernel_init)
        self.score = ScoreParameters(recipe, sizes, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> Float[Array, "*B Q D"]:
        """What each query sees of the set.

        Args:
            x: `[*B, S, in_features]`.
            mask: Which states are there: a boolean array `[*B, S]`, or a mask object such as
                `masks.padding(sizes)`.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where the dropout key comes from; wins over the layer's own stream.

        Returns:
            `[*B, num_queries, in_features]`; 0 for an empty set.
        """
        query, key, value = self._match(x)
        options = {"bias": None, "deterministic": deterministic, "rngs": rngs}
        mask = token_mask("mask", mask, np.shape(x)[:-1])
        return self._run(query, key, value, mask=mask, **options).out[..., 0, :]

    def attention_weights(self, x: Memory, mask: AnyMask = None) -> Float[Array, "*B Q S"]:
        """The weights, before dropout: rows sum to 1, or to 0 for an empty set.

        Args:
            x: As in the call.
            mask: As in the call.
        """
        query, key, _ = self._match(x)
        mask = token_mask("mask", mask, np.shape(x)[:-1])
        return self._weights(query, key, mask=mask, bias=None)[..., 0, :, :]

    def _match(self, x: Any) -> tuple[Array, Array, Array]:
        """Queries, keys and values of one head."""
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        key = shielded(self._hidden, x)
        queries = jnp.asarray(self.queries[...]).astype(key.dtype)
        query = jnp.broadcast_to(queries, (*x.shape[:-2], *queries.shape))
        return query[..., None, :], key[..., None, :], x[..., None, :]

    def _hidden(self, x: Array) -> Array:
        hidden = self.key(x)
        if self.kind == "dot":
            return hidden
        hidden = jnp.tanh(hidden)
        return hidden if self.gate is None else hidden * jax.nn.sigmoid(self.gate(x))
