"""T5's relative position bias: a learned value per head and bucket of distances."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import as_array, check_count, check_floating
from attention_jax._core.numerics import stats_dtype
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides
from attention_jax.positions.bias import Bias
from attention_jax.positions.distance import by_distance

Table = Annotated[Any, Float[Array, "N buckets"]]


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket of one direction.

    The first half of the buckets are the single distances 0, 1, 2, ...; the others are spaced
    logarithmically up to `max_distance`, and the last contains all larger distances. Computed in
    integers, so no rounding moves a boundary: bucket E + j begins at the smallest n with
    (n / E)^L >= (max_distance / E)^j, for E exact and L logarithmic buckets.
    """
    exact = buckets // 2
    spaced = buckets - exact
    starts = list(range(exact))
    n = exact
    for j in range(spaced):
        bound = max_distance**j * exact ** (spaced - j)
        while n**spaced < bound:
            n += 1
        starts.append(n)
    return tuple(starts)


@pytree
class RelativeBias(Bias):
    """`table[n, bucket(distance)]`."""

    table: Any
    bidirectional: bool = static(default=True)
    max_distance: int = static(default=128)

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "relative_bias", {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def _side(self) -> int:
        """Number of buckets per direction."""
        return self.table.shape[-1] // (2 if self.bidirectional else 1)

    def check(self, layout: Layout) -> None:
        """Checks that there is one row per query head."""
        if self.table.shape[0] != layout.N:
            raise ValueError(
                f"table has shape {list(self.table.shape)} but must be [N, buckets] with "
                f"N = {layout.N}"
            )

    def bucket(self, distance: Any) -> Any:
        """The bucket of `distance = key position - query position`, ints of any shape."""
        xp = jnp if isinstance(distance, jax.Array) else np
        away = abs(distance) if self.bidirectional else xp.maximum(-distance, 0)
        bucket = 0 * distance
        for start in bucket_starts(self._side, self.max_distance)[1:]:
            bucket = bucket + (away >= start).astype(bucket.dtype)
        if not self.bidirectional:
            return bucket
        return bucket + self._side * (distance > 0).astype(bucket.dtype)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """`table[n, bucket(distance)]` of every pair in the block."""
        far = bucket_starts(self._side, self.max_distance)[-1]
        limits = (-far, far if self.bidirectional else 0)
        rows = jnp.asarray(self.table).astype(stats_dtype(self.table.dtype))[None]
        return by_distance(rows, query_positions, key_positions, self.bucket, limits)


def relative_bias(table: Table, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """T5's relative position bias, `bias(t, s) = table[n, bucket(position_s - position_t)]`.

    Half of the buckets of a direction are single distances, the others grow logarithmically up to
    `max_distance`; the last contains all larger distances. With `bidirectional` the first half of
    the table is for keys at or before the query, the second for keys after it. Otherwise all keys
    after the query use bucket 0, for use with `causal()`.

    Args:
        table: `[N, buckets]`, finite, differentiable. Not scaled: T5 adds it to unscaled dot
            products.
        bidirectional: whether keys before and after the query have separate buckets.
        max_distance: all distances from this one on share the last bucket.

    Returns:
        A bias object.

    Raises:
        ValueError: too few buckets, or `max_distance` within the single-distance buckets.

    Example:
        >>> table = jnp.arange(8.0)[None]
        >>> relative_bias(table, max_distance=8).to_array(1, 7)[0, 0].tolist()
        [0.0, 5.0, 6.0, 6.0, 7.0, 7.0, 7.0]

    References:
        Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
        Transformer", arXiv:1910.10683, §2.1, and the authors' code.
    """
    as_array("table", table)
    check_floating("table", table)
    if table.ndim != 2:
        raise ValueError(f"table must be [N, buckets], got {list(table.shape)}")
    if not isinstance(bidirectional, (bool, np.bool_)):
        raise TypeError(f"bidirectional must be a bool, got {type(bidirectional).__name__}")
    max_distance = check_count("max_distance", max_distance, 1)
    side = table.shape[1] // (2 if bidirectional else 1)
    if side < 2:
        raise ValueError(
            f"table has {table.shape[1]} buckets but must have at least "
            f"{'4 if bidirectional' if bidirectional else 2}"
        )
    if max_distance <= side // 2:
        raise ValueError(
            f"max_distance {max_distance} must be above {side // 2}, the number of buckets with a "
            "single distance"
        )
    return RelativeBias(table, bool(bidirectional), max_distance)
