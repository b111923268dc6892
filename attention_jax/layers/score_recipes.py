"""Factories of the recipes of scores.

    layer = MultiHeadAttention(8, 64, score=additive(32))

A recipe defines parameters; the layer creates them for its number of heads and depth. Both flavours
export the factories.
"""

from collections.abc import Callable

import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax.layers import recipes
from attention_jax.layers.recipes import ScoreRecipe


def dot() -> ScoreRecipe:
    """The unscaled dot product, `e = q · k`; no parameters.

    Returns:
        A recipe for `attention_jax.scores.dot`.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "dot".
    """
    return recipes.Dot()


def scaled_dot(scale: float | int | None = None) -> ScoreRecipe:
    """The scaled dot product, `e = scale · q · k`; no parameters.

    For a trainable scale pass `attention_jax.scores.scaled_dot` an array.

    Args:
        scale: The factor; None is 1/√H.

    Returns:
        A recipe for `attention_jax.scores.scaled_dot`.

    References:
        Vaswani et al. 2017, arXiv:1706.03762, eq. 1.
    """
    return recipes.ScaledDot(scale)


def general(*, shared: bool = False) -> ScoreRecipe:
    """The bilinear score, `e = qᵀ W k`.

    W is initialised with variance 1/(H·Hk), so that the scores of unit-variance queries and keys
    have unit variance, as those of the scaled dot product.

    Args:
        shared: One W `[H, Hk]` for all heads; otherwise `[N, H, Hk]`.

    Returns:
        A recipe for `attention_jax.scores.general`, with the parameter `weight`.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "general".
    """
    return recipes.General(shared)


def additive(
    hidden_features: int | None = None,
    *,
    shared: bool = False,
    activation: Callable[[Array], Array] = jnp.tanh,
) -> ScoreRecipe:
    """The additive score, `e = v · tanh(q W_query + k W_key)`.

    Args:
        hidden_features: A, the hidden width; None is H, the query's depth.
        shared: One set of parameters for all heads; otherwise one for each head.
        activation: The elementwise function, tanh by default.

    Returns:
        A recipe for `attention_jax.scores.additive`, with the parameters `w_query [N?, H, A]`,
        `w_key [N?, Hk, A]`, `v [N?, A]`.

    References:
        Bahdanau et al. 2014, arXiv:1409.0473, §A.1.2.
    """
    return recipes.Additive(hidden_features, shared, activation)


def concat(
    hidden_features: int | None = None,
    *,
    shared: bool = False,
    activation: Callable[[Array], Array] = jnp.tanh,
) -> ScoreRecipe:
    """The concat score, `e = v · tanh([q; k] W)`.

    Args:
        hidden_features: A, the hidden width; None is H, the query's depth.
        shared: One set of parameters for all heads; otherwise one for each head.
        activation: The elementwise function, tanh by default.

    Returns:
        A recipe for `attention_jax.scores.concat`, with the parameters `weight [N?, H + Hk, A]`,
        the query's rows first, and `v [N?, A]`.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "concat".
    """
    return recipes.Concat(hidden_features, shared, activation)


def cosine(initial_scale: float | int = 10.0) -> ScoreRecipe:
    """Cosine similarity with a learned scale, `e = (softplus(r) + 1e-4) · cos(q, k)`.

    There is one raw parameter r for each head; the scale is positive for any r.

    Args:
        initial_scale: The initial scale of every head, above 1e-4.

    Returns:
        A recipe for `attention_jax.scores.cosine`, with the parameter `raw_scale [N]`.

    References:
        Graves et al. 2014, arXiv:1410.5401, eq. 5-6.
        Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245, eq. 3.
    """
    return recipes.Cosine(initial_scale)
