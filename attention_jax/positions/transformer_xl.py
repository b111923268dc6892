"""Transformer-XL's relative position bias: sinusoids of the distance, weighted by the query."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import as_array, check_floating, check_per_head, check_positive
from attention_jax._core.numerics import matmul, widen
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides, over_heads
from attention_jax.positions.bias import Bias, ContentBias
from attention_jax.positions.phases import geometric, waves

Weight = Annotated[Any, Float[Array, "*N D H"]]
Vector = Annotated[Any, Float[Array, "*N H"]]


@pytree
class TransformerXL(ContentBias):
    """`(u · k + (q + v) · Wᵀ R(distance)) / √H`."""

    weight: Any
    u: Any
    v: Any
    base: float = static(default=10_000.0)
    features: int = static(default=0)

    def _call(self) -> tuple[str, dict[str, Any]]:
        shown = {"weight": self.weight, "u": self.u, "v": self.v}
        return "transformer_xl", shown | {"base": self.base}

    def check(self, layout: Layout) -> None:
        """Checks that query, key, weight, u and v have the same depth H."""
        if layout.H != layout.Hk:
            raise ValueError(f"query depth {layout.H} and key depth {layout.Hk} must match (H)")
        check_per_head("weight", self.weight, "D, H", layout, self.features, layout.H)
        for name, vector in (("u", self.u), ("v", self.v)):
            check_per_head(name, vector, "H", layout, layout.H)

    def prepare(self, query: Array, key: Array) -> Sides:
        """`W (q + v) / √H`, `[*B, N, T, D]`, and `u · k / √H`, `[*B, N, S]`."""
        scale = 1 / np.sqrt(max(query.shape[-1], 1))
        weight = over_heads(self.weight, 2, query.ndim)
        moved = widen(query) + widen(_vector(self.v, query.ndim))
        by_wave = matmul(moved, jnp.swapaxes(weight, -1, -2)) * scale
        keys = jnp.repeat(widen(key), query.shape[-3] // key.shape[-3], axis=-3)
        content = jnp.sum(keys * widen(_vector(self.u, query.ndim)), axis=-1) * scale
        return Sides(query=by_wave, key=content)

    def per_head(self) -> "TransformerXL":
        """Without the parameters, which only `prepare` uses."""
        return TransformerXL(None, None, None, self.base, self.features)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """One product of depth D: sinusoids of a distance from sinusoids of the two positions.

        sin ω(t - s) = sin ωt cos ωs - cos ωt sin ωs, and the same for the cosine.
        """
        by_wave = sides.query
        if by_wave.shape[-1] % 2:
            by_wave = jnp.pad(by_wave, ((0, 0), (0, 1)))
        by_sin, by_cos = by_wave[:, 0::2], by_wave[:, 1::2]
        frequencies = geometric(self.base, self.features)
        sin_t, cos_t = waves(query_positions, frequencies, by_wave.dtype)
        sin_s, cos_s = waves(key_positions, frequencies, by_wave.dtype)
        rotated = by_sin * sin_t + by_cos * cos_t, by_cos * sin_t - by_sin * cos_t
        content = sides.key[None, :].astype(by_wave.dtype)
        return matmul(rotated[0], cos_s.T) + matmul(rotated[1], sin_s.T) + content


def _vector(vector: Any, ndim: int) -> Array:
    """`[H]` or `[N, H]`, reshaped to broadcast with `[*B, N, length, H]`."""
    return over_heads(vector if np.ndim(vector) == 2 else jnp.asarray(vector)[None], 1, ndim)


def transformer_xl(weight: Weight, u: Vector, v: Vector, *, base: float | int = 10_000.0) -> Bias:
    """Transformer-XL's relative position bias, for the scaled dot product.

        bias(t, s) = (u · k_s  +  (q_t + v) · r_ts) / √H,   r_ts = Wᵀ R(position_t - position_s)

    R is `sinusoidal`. The paper's four terms are `scaled_dot() + transformer_xl(weight, u, v)`. It
    costs 2·D operations per pair in addition to the score, the same for any positions.

    Args:
        weight: `[D, H]` or `[N, D, H]`, W_{k,R}: projects D sinusoidal features to depth H.
        u: `[H]` or `[N, H]`, replaces the query in the content term.
        v: `[H]` or `[N, H]`, replaces the query in the position term.
        base: base of the sinusoids' wavelengths.

    Returns:
        A bias object; its parameters are differentiable.

    References:
        Dai et al. 2019, "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context",
        arXiv:1901.02860, §3.3.
    """
    for name, array, ranks, letters in (
        ("weight", weight, (2, 3), "[D, H] or [N, D, H]"),
        ("u", u, (1, 2), "[H] or [N, H]"),
        ("v", v, (1, 2), "[H] or [N, H]"),
    ):
        as_array(name, array)
        check_floating(name, array)
        if array.ndim not in ranks:
            raise ValueError(f"{name} must be {letters}, got {list(array.shape)}")
    return TransformerXL(weight, u, v, check_positive("base", base), weight.shape[-2])
