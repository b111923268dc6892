"""The weights of a score at initialisation, by depth.

For q, k ~ N(0, 1) of depth d, the dot product has standard deviation √d, so that its softmax
becomes one-hot as d grows, and its gradient vanishes. For one query,

    entropy   −Σ p ln p / ln S                   1: uniform, 0: one key takes all
    largest   max_s p_s
    Jacobian  ‖diag(p) − p pᵀ‖_F                 the size of the softmax's derivative

References:
    Vaswani et al. 2017, arXiv 1706.03762, §3.2.1 and footnote 4.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import attention_jax as aj

SCORES = ("dot", "scaled_dot", "additive")


def row_statistics(weights: Float[Array, "*rows S"]) -> dict[str, Float[Array, "*rows"]]:
    """Return entropy / ln S, largest weight and the norm of the softmax Jacobian of each row.

    ‖diag(p) − p pᵀ‖²_F = Σ p² − 2 Σ p³ + (Σ p²)², so no [S, S] array is needed.
    """
    squares = jnp.sum(weights**2, axis=-1)
    cubes = jnp.sum(weights**3, axis=-1)
    logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
    return {
        "entropy": -jnp.sum(weights * logs, axis=-1) / np.log(weights.shape[-1]),
        "largest": jnp.max(weights, axis=-1),
        "jacobian": jnp.sqrt(jnp.maximum(squares - 2 * cubes + squares**2, 0.0)),
    }


def measure(depth: int, seed: int, *, queries: int = 400, keys: int = 32) -> dict[str, object]:
    """Return, for one depth and one draw, the statistics of each score's weights.

    Entropy and largest weight are means over the queries, the Jacobian's norm is their median. The
    additive score has hidden width ``depth``, W ~ N(0, 1/depth) and v ~ N(0, 1/depth).
    """
    rng = np.random.default_rng([seed, depth])

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    query, key = normal(queries, 1, depth), normal(keys, 1, depth)
    w_query, w_key = (normal(depth, depth, scale=depth**-0.5) for _ in range(2))
    scores = {
        "dot": aj.scores.dot(),
        "scaled_dot": aj.scores.scaled_dot(),
        "additive": aj.scores.additive(w_query, w_key, normal(depth, scale=depth**-0.5)),
    }
    products = jnp.einsum("tnh,snh->nts", query, key)
    found: dict[str, object] = {"depth": depth, "seed": seed, "sd": float(jnp.std(products))}
    for name, score in scores.items():
        rows = row_statistics(aj.attention_weights(query, key, score=score)[0])
        found[name] = {
            "entropy": float(jnp.mean(rows["entropy"])),
            "largest": float(jnp.mean(rows["largest"])),
            "jacobian": float(jnp.median(rows["jacobian"])),
        }
    return found
