"""Attention pooling: from a set of any size to a few vectors."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import (
    AnyMask,
    Memory,
    cast,
    check_choice,
    check_width,
    token_mask,
)
from attention_jax._modules.flags import Flag
from attention_jax._modules.recipes import BIAS_INIT, Initializer, drawn
from attention_jax._modules.shield import shielded
from attention_jax.linen.base import AttentionLayer
from attention_jax.scores import Score, dot, scaled_dot


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
        bias_init: Initialiser of the biases.
        use_bias: Whether W and U have biases.
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels and of the queries `[Q, A]`.
        mask: A mask object or boolean array that holds in every call.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import AttentionPooling
        >>> pool, bags = AttentionPooling(6, 4, score="gated"), jnp.ones((2, 5, 6))
        >>> pool.apply(pool.init(jax.random.key(0), bags), bags, jnp.ones((2, 5), bool)).shape
        (2, 1, 6)

    References:
        Ilse, Tomczak, Welling 2018, "Attention-based Deep Multiple Instance Learning",
        arXiv:1802.04712, eq. 8-9 (additive and gated).
        Lee et al. 2019, "Set Transformer", arXiv:1810.00825, §3.2 (learned queries).
    """

    in_features: int
    hidden_features: int
    num_queries: int = 1
    _: dataclasses.KW_ONLY
    score: str = "dot"
    bias_init: Initializer = BIAS_INIT
    use_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("in_features", "hidden_features", "num_queries"):
            check_count(name, getattr(self, name), 1)
        check_choice("score", self.score, "dot", "additive", "gated")
        super().__post_init__()

    def setup(self) -> None:
        """The projections and the queries."""
        options = {
            "use_bias": self.use_bias,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "precision": self.precision,
            "kernel_init": self.kernel_init,
            "bias_init": self.bias_init,
        }
        self.key = nn.Dense(self.hidden_features, **options)
        if self.score == "gated":
            self.gate = nn.Dense(self.hidden_features, **options)
        # A column of fan-in A for each query.
        shape = (self.hidden_features, self.num_queries)
        self.queries = self.param(
            "queries", lambda key: drawn(self.kernel_init, key, shape, self.param_dtype).T
        )

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        dropout_rng: Any = None,
    ) -> Float[Array, "*B Q D"]:
        """What each query sees of the set.

        Args:
            x: `[*B, S, in_features]`.
            mask: Which states are there: a boolean array `[*B, S]`, or a mask object such as
                `masks.padding(sizes)`.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            dropout_rng: The dropout key; None takes one from the stream "dropout".

        Returns:
            `[*B, num_queries, in_features]`; 0 for an empty set.
        """
        result = self._run(
            *self._match(x),
            score=self._score(),
            mask=token_mask("mask", mask, np.shape(x)[:-1]),
            bias=None,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
        )
        return result.out[..., 0, :]

    def attention_weights(self, x: Memory, mask: AnyMask = None) -> Float[Array, "*B Q S"]:
        """The weights, before dropout: rows sum to 1, or to 0 for an empty set.

        Args:
            x: As in the call.
            mask: As in the call.
        """
        query, key, _ = self._match(x)
        mask = token_mask("mask", mask, np.shape(x)[:-1])
        weights = self._weights(query, key, score=self._score(), mask=mask, bias=None)
        return weights[..., 0, :, :]

    @nn.nowrap
    def _score(self) -> Score:
        return scaled_dot() if self.score == "dot" else dot()

    def _match(self, x: Any) -> tuple[Array, Array, Array]:
        """Queries, keys and values of one head."""
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        key = shielded(self._hidden, x)
        queries = jnp.asarray(self.queries).astype(key.dtype)
        query = jnp.broadcast_to(queries, (*x.shape[:-2], *queries.shape))
        return query[..., None, :], key[..., None, :], x[..., None, :]

    def _hidden(self, x: Array) -> Array:
        hidden = self.key(x)
        if self.score == "dot":
            return hidden
        hidden = jnp.tanh(hidden)
        return hidden * jax.nn.sigmoid(self.gate(x)) if self.score == "gated" else hidden
