"""Attention pooling of a set of any size to a fixed number of vectors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.numerics import through_float32
from attention_jax.layers import recipes
from attention_jax.layers.arguments import (
    AnyMask,
    Memory,
    cast,
    check_choice,
    check_width,
    token_mask,
)
from attention_jax.layers.attending import AttentionLayer
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.nonfinite import nan_propagating
from attention_jax.layers.recipes import BIAS_INIT, Initializer, drawn
from attention_jax.layers.training import Flag


@settings
class AttentionPooling(AttentionLayer):
    """Attention pooling: learned queries attend to a set, and each returns a weighted mean.

        dot:       e(i, s) = q_i · W x_s / √A
        additive:  e(i, s) = q_i · tanh(W x_s)
        gated:     e(i, s) = q_i · (tanh(W x_s) ⊙ σ(U x_s))
        out_i = Σ_s softmax_s(e(i, s)) x_s

    The states are averaged unprojected, so a weight is a state's contribution. The result does not
    depend on their order. In the paper of the gated form q is w, W is V, and there is one query.

    Args:
        in_features: D, width of the states and of the output.
        hidden_features: A, width of the queries and of the projected states.
        num_queries: Q, the number of output vectors.
        score: "dot", "additive" or "gated".
        kernel_init: Initialiser of the kernels and of the queries `[Q, A]`.
        use_bias: Whether W and U have biases.

    Raises:
        ValueError: If a size is not positive, the rate lies outside [0, 1), or a name is unknown.

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

    _counts = ("in_features", "hidden_features", "num_queries")

    def _check(self, given: Any) -> None:
        super()._check(given)
        check_choice("score", given.score, "dot", "additive", "gated")

    def _build(self, make: Construction) -> None:
        self.kind = make.given.score
        sizes = (self.in_features, self.hidden_features)
        self.key = make.dense(*sizes)
        self.gate = make.dense(*sizes) if self.kind == "gated" else None
        # A column of fan-in A for each query.
        shape = (self.hidden_features, self.num_queries)
        init, dtype = make.given.kernel_init, self.param_dtype
        self.queries = make.param("queries", lambda key: drawn(init, key, shape, dtype).T)
        make.dropout_stream(self.dropout_rate)
        recipe = recipes.ScaledDot() if self.kind == "dot" else recipes.Dot()
        make.score(recipe, 1, self.hidden_features, self.hidden_features)

    def __call__(
        self, x: Memory, mask: AnyMask = None, *, deterministic: Flag = None, **random: Any
    ) -> Float[Array, "*B Q D"]:
        """The weighted mean of the set for each query.

        Args:
            x: `[*B, S, in_features]`.
            mask: The states that are present: a boolean array `[*B, S]`, or a mask object such as
                `masks.padding(sizes)`.

        Returns:
            `[*B, num_queries, in_features]`; 0 for an empty set.
        """
        query, key, value = self._one_head(x)
        flags = {"deterministic": deterministic, "random": random}
        mask = token_mask("mask", mask, np.shape(x)[:-1])
        return self._run(query, key, value, mask=mask, **flags).out[..., 0, :]

    def attention_weights(self, x: Memory, mask: AnyMask = None) -> Float[Array, "*B Q S"]:
        """The weights, before dropout: rows sum to 1, or to 0 for an empty set."""
        query, key, _ = self._one_head(x)
        mask = token_mask("mask", mask, np.shape(x)[:-1])
        return self._weights(query, key, mask=mask)[..., 0, :, :]

    def _one_head(self, x: Any) -> tuple[Array, Array, Array]:
        check_width("x", x, self.in_features, "[*B, S, in_features]")
        x = jnp.asarray(cast(x, self.dtype))
        key = nan_propagating(self._hidden, x)
        queries = jnp.asarray(self.queries[...]).astype(key.dtype)
        shape = (*x.shape[:-2], *queries.shape)
        query = through_float32(lambda x: jnp.broadcast_to(x, shape), queries)
        return query[..., None, :], key[..., None, :], x[..., None, :]

    def _hidden(self, x: Array) -> Array:
        hidden = self.key(x)
        if self.kind == "dot":
            return hidden
        hidden = jnp.tanh(hidden)
        return hidden if self.gate is None else hidden * jax.nn.sigmoid(self.gate(x))
