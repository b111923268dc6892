"""Functions that make the recipes of scores, by the names of the scores.

    layer = MultiHeadAttention(8, 64, score=additive(32))

Each factory says which parameters to make; the layer draws them for its own number of heads and its
own depth. Both flavours of modules have them.
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

    For a scale that trains, give `attention_jax.scores.scaled_dot` an array.

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

    W starts with variance 1/(H·Hk), so that scores of unit-variance queries and keys start with
    unit variance, as the scaled dot product's do.

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
        activation: Any elementwise function in tanh's place.

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
        activation: Any elementwise function in tanh's place.

    Returns:
        A recipe for `attention_jax.scores.concat`, with the parameters `weight [N?, H + Hk, A]`,
        the query's rows first, and `v [N?, A]`.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "concat".
    """
    return recipes.Concat(hidden_features, shared, activation)


def cosine(initial_scale: float | int = 10.0) -> ScoreRecipe:
    """Cosine similarity with a learned scale, `e = (softplus(r) + 1e-4) · cos(q, k)`.

    There is one raw parameter r for each head; whatever its value, the scale is positive, so no
    preference flips.

    Args:
        initial_scale: The scale that every head starts with, above 1e-4.

    Returns:
        A recipe for `attention_jax.scores.cosine`, with the parameter `raw_scale [N]`.

    References:
        Graves et al. 2014, arXiv:1410.5401, eq. 5-6.
        Henry et al. 2020, "Query-Key Normalization for Transformers", arXiv:2010.04245, eq. 3.
    """
    return recipes.Cosine(initial_scale)
