"""Feature maps of linear attention.

    weight(t, s) ∝ φ(q_t) · φ(k_s)

A map is a frozen pytree. Its features should be non-negative, because the sum of weights of
different signs may vanish. A row of query features may be scaled by any positive factor, which the
normalisation cancels; a row of key features may be scaled if the logarithm of its factor is
returned.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array, check_count, check_floating
from attention_jax._core.pytrees import Bound, Record, pytree, static

# The smallest logarithm of a random feature, relative to the largest of its row.
_FLOOR = -60


class FeatureMap(Record):
    """A feature map φ; `query` and `key` use `features` unless they are overridden."""

    def check(self, depth: int, length: int) -> None:
        """Raises ValueError if the map does not fit the depth H or the largest length."""

    def features(self, x: Array, positions: Array) -> Array:
        """The features `[..., length, F]` of `x [..., length, H]` at `positions [length]`."""
        raise NotImplementedError(f"{type(self).__name__} has no features")

    def query(self, x: Array, positions: Array) -> Array:
        """Features of queries, up to a positive factor per row."""
        return self.features(x, positions)

    def key(self, x: Array, positions: Array) -> tuple[Array, Array | None]:
        """Features of keys, and the logarithm of each row's factor `[..., length]`, None if 1."""
        return self.features(x, positions), None


@pytree
class Elu(FeatureMap):
    """`φ(x) = elu(x) + 1`."""

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "elu_features", {}

    def features(self, x: Array, positions: Array) -> Array:
        """`x + 1` above 0 and `exp(x)` below, without the cancellation in `elu(x) + 1`."""
        return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


@pytree
class Relu(FeatureMap):
    """`φ(x) = max(x, 0) + offset`."""

    offset: float | int = static(default=0.0)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "relu_features", {"offset": self.offset or None}

    def features(self, x: Array, positions: Array) -> Array:
        """`max(x, 0) + offset`."""
        return jax.nn.relu(x) + self.offset


@pytree
class Cosine(FeatureMap):
    """`φ(x, p) = [max(x, 0) cos a, max(x, 0) sin a]`, `a = π p / 2M`."""

    max_length: int = static()

    def __repr__(self) -> str:
        return f"cosine_features({self.max_length})"

    def check(self, depth: int, length: int) -> None:
        """Checks that distances stay below M, where the cosine becomes negative."""
        if length > self.max_length:
            raise ValueError(
                f"cosine_features(max_length={self.max_length}) is too short for length {length}"
            )

    def features(self, x: Array, positions: Array) -> Array:
        """2H features; NaN at positions of `max_length` and beyond."""
        angle = positions.astype(x.dtype) * (math.pi / (2 * self.max_length))
        # The positions of a state may exceed M, which is known only at run time.
        angle = jnp.where(positions < self.max_length, angle, jnp.nan)
        angle = angle.reshape((1,) * (x.ndim - 2) + (-1, 1))
        x = jax.nn.relu(x)
        return jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], axis=-1)


@pytree
class Favor(FeatureMap):
    """`φ(x) = exp(w_i · x̃ - |x̃|² / 2)`, `x̃ = x / H^¼`, for each row w_i of the projection.

    Attributes:
        projection: `[F, H]`.
        orthogonal: whether `redraw` draws orthogonal rows.
    """

    projection: Any
    orthogonal: bool = static(default=True)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "favor_features", {"projection": self.projection}

    def redraw(self, key: Any) -> "Favor":
        """A map of the same size with new random features, drawn from the PRNG key."""
        num_features, depth = self.projection.shape
        projection = draw_projection(key, num_features, depth, self.orthogonal)
        return Favor(projection.astype(self.projection.dtype), self.orthogonal)

    def check(self, depth: int, length: int) -> None:
        """Checks the depth for which the projection was drawn."""
        if self.projection.shape[-1] != depth:
            raise ValueError(
                f"favor_features were drawn for depth {self.projection.shape[-1]}, but query and "
                f"key have depth {depth} (H)"
            )

    def _features(self, x: Array) -> tuple[Array, Array]:
        """Features scaled to a maximum of 1 per row, and the logarithm of the row's factor."""
        x = x * (max(x.shape[-1], 1) ** -0.25)
        products = jnp.matmul(x, jnp.asarray(self.projection).astype(x.dtype).T)
        exponent = products - jnp.sum(x * x, axis=-1, keepdims=True) / 2
        top = jax.lax.stop_gradient(jnp.max(exponent, axis=-1, keepdims=True))
        # The floor is far below rounding; it keeps the product of any two rows above 0.
        return jnp.exp(jnp.maximum(exponent - top, _FLOOR)), top[..., 0]

    def query(self, x: Array, positions: Array) -> Array:
        """Features scaled to a maximum of 1 per row."""
        return self._features(x)[0]

    def key(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """Features scaled to a maximum of 1 per row, and the logarithm of the row's factor."""
        return self._features(x)


@pytree
class Custom(FeatureMap):
    """A custom function of the last axis."""

    function: Bound

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "feature_map", {"f": self.function.function}

    def features(self, x: Array, positions: Array) -> Array:
        """Calls the function and checks what it returns."""
        y = self.function(x)
        check_floating("feature_map(x)", as_array("feature_map(x)", y))
        if y.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"feature_map(x) must be [..., F] for x [..., H] = {list(x.shape)}, "
                f"got {list(y.shape)}"
            )
        return y.astype(x.dtype)


def as_feature_map(feature_map: Any) -> FeatureMap:
    """Converts the argument `feature_map` to a feature map."""
    if feature_map is None:
        return Elu()
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if not callable(feature_map):
        raise TypeError(
            "feature_map must be a feature map such as subquadratic.elu_features(), or a function "
            f"[..., H] -> [..., F], got {type(feature_map).__name__}"
        )
    return Custom(Bound.of(feature_map))


def elu_features() -> FeatureMap:
    """ELU feature map, `φ(x) = elu(x) + 1`: H positive, deterministic features.

    Returns:
        A feature map.

    References:
        Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with
        Linear Attention", arXiv:2006.16236, eq. 7.
    """
    return Elu()


def relu_features(offset: float | int = 0.0) -> FeatureMap:
    """ReLU feature map, `φ(x) = max(x, 0) + offset`: H features, sparse if the offset is 0.

    Args:
        offset: added to every feature, at least 0. With 0 all products of a query with keys may be
            0; then its output is 0.

    Returns:
        A feature map.

    Raises:
        ValueError: a negative offset.

    References:
        Choromanski et al. 2020, "Rethinking Attention with Performers", arXiv:2009.14794, §4
        (Performer-ReLU, with an offset of 0.001 in the authors' code).
    """
    if not offset >= 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    return Relu(float(offset))


def cosine_features(max_length: int) -> FeatureMap:
    """CosFormer feature map: a product that decays with the distance, by a cosine.

        φ(x, p) = [relu(x) cos a_p, relu(x) sin a_p],   a_p = π p / 2M
        φ(q, t) · φ(k, s) = relu(q) · relu(k) cos(a_t - a_s)

    Args:
        max_length: M, positive; positions must be below it, so that no cosine is negative.

    Returns:
        A feature map with 2H features.

    References:
        Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", arXiv:2202.08791
        (cosine-based re-weighting).
    """
    return Cosine(check_count("max_length", max_length, 1))


def favor_features(
    key: Any, depth: int, num_features: int, *, orthogonal: bool = True
) -> FeatureMap:
    """FAVOR+: positive random features whose expected product is `exp(q · k / √H)`.

        φ(x)_i = exp(w_i · x̃ - |x̃|² / 2),   x̃ = x / H^¼,   w_i ~ N(0, I)

    The error decreases as 1/√F and grows as `exp(|q̃ + k̃|²)` with the norms. Exponents are
    relative to the largest of the row, so features do not underflow for large norms.

    Args:
        key: a PRNG key.
        depth: H, the depth of one head.
        num_features: F, number of features.
        orthogonal: whether rows of the projection are orthogonal in runs of H, which never
            increases the variance; their norms are distributed as those of independent rows.

    Returns:
        A feature map; its `projection [F, H]` is a leaf, and `redraw(key)` draws a new one.

    References:
        Choromanski et al. 2020, "Rethinking Attention with Performers", arXiv:2009.14794,
        Lemma 1 (positive features), Lemma 2 (their mean square error), §2.4 (orthogonal rows).
    """
    depth = check_count("depth", depth, 1)
    num_features = check_count("num_features", num_features, 1)
    return Favor(draw_projection(key, num_features, depth, orthogonal), orthogonal)


def draw_projection(key: Any, num_features: int, depth: int, orthogonal: bool) -> Array:
    """Gaussian rows `[F, H]`; if orthogonal, in runs of H, with norms of independent rows."""
    if not orthogonal:
        return jax.random.normal(key, (num_features, depth), jnp.float32)
    directions, lengths = jax.random.split(key)
    runs = -(-num_features // depth)
    square = jax.random.normal(directions, (runs, depth, depth), jnp.float32)
    q, r = jnp.linalg.qr(square)
    # QR fixes the signs of R's diagonal; multiplying them into Q makes the rotation uniform.
    rows = jnp.swapaxes(q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[:, None, :], -1, -2)
    norms = jnp.linalg.norm(jax.random.normal(lengths, (runs * depth, depth), jnp.float32), axis=-1)
    return (rows.reshape(-1, depth) * norms[:, None])[:num_features]


# The accepted types of a `feature_map` argument; `as_feature_map` checks them.
Features = Annotated[Any, FeatureMap | Callable[[Array], Array] | None]
