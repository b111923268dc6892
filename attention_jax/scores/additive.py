"""Additive scores: a one-layer network on the sum of a projected query and a projected key.

    e(t, s) = Σ_a v_a · f(q_t W_query + k_s W_key)_a

The projections are computed once, O(T + S); a block adds one hidden feature after another to its
[Tb, Sb] plane, so that no array of T·S·A elements exists, forward or backward.

References:
    Bahdanau, Cho, Bengio 2014, "Neural Machine Translation by Jointly Learning to Align and
    Translate", arXiv:1409.0473, appendix A.1.2 (additive).
    Luong, Pham, Manning 2015, arXiv:1508.04025, §3.1 (concat).
    Brody, Alon, Yahav 2021, "How Attentive are Graph Attention Networks?", arXiv:2105.14491,
    eq. 7 (GATv2: a leaky ReLU of slope 0.2 as the activation).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_jax._core.axes import Key, Layout, Query
from attention_jax._core.checks import check_callable, check_parameter, check_per_head
from attention_jax._core.numerics import matmul, promote, through_float32, widen
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides, head_axis, over_heads
from attention_jax.scores.plane import BOUNDED, additive_plane
from attention_jax.scores.score import Score

Activation = Callable[[Array], Array]


def project_key(key: Array, weight: Any, heads: int) -> Array:
    """`k W`: `[*B, K, S, A]` for a shared weight, `[*B, N, S, A]` for one weight a query head."""
    if jnp.ndim(weight) == 3 and key.shape[-3] != heads:
        group = heads // key.shape[-3]
        key = through_float32(lambda x: jnp.repeat(x, group, axis=-3), key)
    return matmul(key, over_heads(weight, 2, key.ndim))


def _in_range(x: Array) -> Array:
    """`x` with infinities replaced by the largest finite number.

    The sum of opposite infinities is NaN. f is constant there, or the score overflows. `clip` would
    store twice as much for its derivative.
    """
    largest = jnp.copysign(jnp.asarray(jnp.finfo(x.dtype).max, x.dtype), x)
    return jnp.where(jnp.isinf(x), jax.lax.stop_gradient(largest), x)


@pytree
class Additive(Score):
    """`e = v · f(q W_query + k W_key)`."""

    w_query: Any
    w_key: Any
    v: Any
    activation: Activation = static(default=jnp.tanh)

    def check(self, layout: Layout) -> None:
        """The three parameters must fit the depths and agree on the hidden width A."""
        A = jnp.shape(self.v)[-1] if jnp.ndim(self.v) else 0
        check_per_head("w_query", self.w_query, "H, A", layout, layout.H, A)
        check_per_head("w_key", self.w_key, "Hk, A", layout, layout.Hk, A)
        check_per_head("v", self.v, "A", layout, A)

    def prepare(self, query: Array, key: Array) -> Sides:
        """The two projections."""
        projected = matmul(query, over_heads(self.w_query, 2, query.ndim))
        keys = project_key(key, self.w_key, query.shape[-3])
        return Sides(_in_range(projected), _in_range(keys))

    def per_head(self) -> "Additive":
        """Only `v` is left for the blocks."""
        return Additive(None, None, widen(head_axis(self.v, 1)), self.activation)

    def block(self, sides: Sides, query_positions: Array, key_positions: Array) -> Array:
        """The plane, feature by feature."""
        dtype = promote(sides.query.dtype, sides.key.dtype, self.v.dtype)
        rows, columns, v = (x.astype(dtype) for x in (sides.query, sides.key, self.v))
        return additive_plane(rows, columns, v, self.activation)

    @property
    def may_overflow(self) -> bool:
        """Unless f and its slope are bounded."""
        return self.activation not in BOUNDED

    @property
    def block_hint(self) -> tuple[int, int]:
        """A plane that is updated once for every feature should fit in cache."""
        return (512, 512)


@pytree
class Concat(Score):
    """`e = v · f([q; k] W)`: the additive score with its two projections stacked."""

    weight: Any
    v: Any
    activation: Activation = static(default=jnp.tanh)

    def check(self, layout: Layout) -> None:
        """The weight has the query's H rows first, then the key's Hk."""
        A = jnp.shape(self.v)[-1] if jnp.ndim(self.v) else 0
        check_per_head("weight", self.weight, "H + Hk, A", layout, layout.H + layout.Hk, A)
        check_per_head("v", self.v, "A", layout, A)

    def _additive(self, depth: int) -> Additive:
        weight = jnp.asarray(self.weight)
        return Additive(weight[..., :depth, :], weight[..., depth:, :], self.v, self.activation)

    def prepare(self, query: Array, key: Array) -> Sides:
        """The two halves of the projection."""
        return self._additive(query.shape[-1]).prepare(query, key)

    def per_head(self) -> Additive:  # type: ignore[override]
        """From here on it is an additive score."""
        return Additive(None, None, self.v, self.activation).per_head()

    @property
    def may_overflow(self) -> bool:
        """As the additive score."""
        return self.activation not in BOUNDED

    @property
    def block_hint(self) -> tuple[int, int]:
        """As the additive score's."""
        return (512, 512)


def additive(
    w_query: Any,
    w_key: Any,
    v: Any,
    *,
    activation: Any = jnp.tanh,
) -> Score:
    """The additive score, `e = v · f(q W_query + k W_key)`.

    The paper's W_a, U_a, v_a are our w_query, w_key, v.

    Args:
        w_query: `[H, A]`, shared by all heads, or `[N, H, A]`.
        w_key: `[Hk, A]` or `[N, Hk, A]`; the key's depth may differ from the query's.
        v: `[A]` or `[N, A]`.
        activation: any elementwise function. GATv2's is a leaky ReLU of slope 0.2 under an
            adjacency mask: `functools.partial(jax.nn.leaky_relu, negative_slope=0.2)`; the default
            slope of `jax.nn.leaky_relu` is 0.01.

    Returns:
        A score object; the three arrays are its parameters.

    References:
        Bahdanau et al. 2014, arXiv:1409.0473, appendix A.1.2.
    """
    for name, parameter in (("w_query", w_query), ("w_key", w_key), ("v", v)):
        check_parameter(name, parameter)
    check_callable("activation", activation)
    return Additive(w_query, w_key, v, activation)


def concat(weight: Any, v: Any, *, activation: Any = jnp.tanh) -> Score:
    """The concat score, `e = v · f([q; k] W)`.

    Args:
        weight: `[H + Hk, A]` or `[N, H + Hk, A]`, the query's rows first.
        v: `[A]` or `[N, A]`.
        activation: any elementwise function.

    Returns:
        A score object; the two arrays are its parameters.

    References:
        Luong et al. 2015, arXiv:1508.04025, §3.1, "concat".
    """
    check_parameter("weight", weight)
    check_parameter("v", v)
    check_callable("activation", activation)
    return Concat(weight, v, activation)


def additive_score(
    query: Query,
    key: Key,
    w_query: Any,
    w_key: Any,
    v: Any,
    *,
    activation: Any = jnp.tanh,
) -> Float[Array, "*B N T S"]:
    """`e = v · f(q W_query + k W_key)` for all pairs; see `additive`."""
    return additive(w_query, w_key, v, activation=activation)(query, key)


def concat_score(
    query: Query,
    key: Key,
    weight: Any,
    v: Any,
    *,
    activation: Any = jnp.tanh,
) -> Float[Array, "*B N T S"]:
    """`e = v · f([q; k] W)` for all pairs; see `concat`."""
    return concat(weight, v, activation=activation)(query, key)
