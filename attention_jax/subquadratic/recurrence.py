"""The sums of linear attention: parallel, chunked and recurrent.

    numerator_t = Σ_s (φ(q_t) · φ(k_s)) v_s,   denominator_t = Σ_s φ(q_t) · φ(k_s)

Arrays are `[B, K, ...]`, queries `[B, K, G, T, F]`. Keys may carry the logarithm of a factor; sums
are then relative to the largest factor so far, as in an online softmax, so they do not overflow,
and a masked key cannot make the visible ones underflow.

Features are computed chunk by chunk where they are used, and recomputed in the backward pass.
Memory holds the inputs, the result, and one sum per chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.mesh_axes import vary_as

# The logarithm of the factor of an absent key; finite, so that differences are not NaN.
LOWEST = -1e30


class Sums(NamedTuple):
    """Sums over the keys so far: `numerator [B, K, F, V]`, `denominator [B, K, F]`.

    Both are relative to `exp(shift [B, K])`.
    """

    numerator: Array
    denominator: Array
    shift: Array


class Keys(NamedTuple):
    """`features [B, K, S, F]`, `value [B, K, S, V]`, and log factors `scale [B, K, S]` or None."""

    features: Array
    value: Array
    scale: Array | None


class Ready(NamedTuple):
    """The functions from tokens, trees of arrays `[B, heads, length, ...]`, to features.

    `query(tokens)` is `[B, K, G, length, F]`, `keys(tokens)` are `Keys`.
    """

    query: Callable[[Any], Array]
    keys: Callable[[Any], Keys]


def read(query: Array, sums: Sums) -> tuple[Array, Array]:
    """Numerator and denominator of `query [B, K, G, t, F]` over all keys in the sums."""
    numerator = jnp.einsum("bkgtf,bkfv->bkgtv", query, sums.numerator)
    return numerator, jnp.einsum("bkgtf,bkf->bkgt", query, sums.denominator)


def absorb(sums: Sums, keys: Keys) -> Sums:
    """Adds keys to the sums."""
    features = keys.features
    shift = sums.shift
    if keys.scale is not None:
        shift = jnp.maximum(shift, jnp.max(keys.scale, axis=-1, initial=LOWEST))
        features = features * jnp.exp(keys.scale - shift[..., None])[..., None]
        sums = _relative_to(sums, shift)
    return Sums(
        sums.numerator + jnp.einsum("bksf,bksv->bkfv", features, keys.value),
        sums.denominator + jnp.sum(features, axis=2),
        shift,
    )


def _relative_to(sums: Sums, shift: Array) -> Sums:
    factor = jnp.exp(sums.shift - shift)[..., None]
    return Sums(sums.numerator * factor[..., None], sums.denominator * factor, shift)


def together(query: Array, keys: Keys, sums: Sums, visible: Any) -> tuple[Array, Array]:
    """Numerator and denominator from all pairs: O(t·s).

    Args:
        query: `[B, K, G, t, F]`.
        keys: s keys.
        sums: sums over earlier keys, visible to every query.
        visible: bool `[t, s]`, or None for all.
    """
    weights = jnp.einsum("bkgtf,bksf->bkgts", query, keys.features)
    numerator, denominator = read(query, sums)
    seen = None if visible is None else jnp.broadcast_to(visible, weights.shape)
    if keys.scale is not None:
        scale = jnp.broadcast_to(
            keys.scale[:, :, None, :], (*weights.shape[:2], *weights.shape[3:])
        )
        if seen is not None:
            scale = jnp.where(seen[:, :, 0], scale, LOWEST)
        # Each row has its own reference, so masked keys do not change even its rounding.
        shift = jnp.maximum(sums.shift[..., None], jnp.max(scale, axis=-1, initial=LOWEST))
        weights = weights * jnp.exp(scale - shift[..., None])[:, :, None]
        before = jnp.exp(sums.shift[..., None] - shift)[:, :, None]
        numerator, denominator = numerator * before[..., None], denominator * before
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    return (
        numerator + jnp.einsum("bkgts,bksv->bkgtv", weights, keys.value),
        denominator + jnp.sum(weights, axis=-1),
    )


def divide(numerator: Array, denominator: Array) -> tuple[Array, Array]:
    """The quotient, 0 where the denominator is 0; and whether the denominator is not 0."""
    sees = denominator != 0
    # Dividing by the denominator's value first keeps its square, in the derivative, in range.
    scale = jax.lax.stop_gradient(jnp.where(sees, denominator, 1))
    out = (numerator / scale[..., None]) / jnp.where(sees, denominator / scale, 1)[..., None]
    return jnp.where(sees[..., None], out, 0), sees


def absorb_in_order(sums: Sums, tokens: Any, size: int, ready: Ready) -> Sums:
    """`absorb`, `size` keys at a time."""
    length = _length(tokens)
    if length <= size:
        return absorb(sums, ready.keys(tokens)) if length else sums

    def body(sums: Sums, tokens: Any) -> tuple[Sums, None]:
        return absorb(sums, ready.keys(tokens)), None

    return jax.lax.scan(jax.checkpoint(body), vary_as(sums, tokens), _runs(tokens, size))[0]


def chunks(
    queries: Any, tokens: Any, sums: Sums, size: int, ready: Ready
) -> tuple[Array, Array, Sums]:
    """Causal attention over the sums and keys 0 .. t: pairs within a chunk, sums before it.

    Args:
        queries: T query tokens.
        tokens: T key tokens.
        sums: sums over earlier keys.
        size: length of a chunk.
        ready: the feature functions.

    Returns:
        The output `[B, K, G, T, V]`, whether its denominator is not 0 `[B, K, G, T]`, and the sums
        over all keys.
    """
    T = _length(queries)
    size = max(1, min(size, T))
    lower = np.tril(np.ones((size, size), np.bool_))

    def body(sums: Sums, parts: tuple[Any, Any]) -> tuple[Sums, tuple[Array, Array]]:
        query, keys = ready.query(parts[0]), ready.keys(parts[1])
        return absorb(sums, keys), divide(*together(query, keys, sums, lower))

    both = (queries, tokens)
    sums, parts = jax.lax.scan(jax.checkpoint(body), vary_as(sums, both), _runs(both, size))
    out, sees = (jnp.moveaxis(x, 0, 3) for x in parts)
    out, sees = (x.reshape(*x.shape[:3], -1, *x.shape[5:])[:, :, :, :T] for x in (out, sees))
    return out, sees, sums


def steps(query: Array, keys: Keys, sums: Sums) -> tuple[Array, Array, Sums]:
    """The recurrent form of `chunks`: per token, add its key to the sums, then read them.

    Args:
        query: features, `[B, K, G, T, F]`.
        keys: T keys.
        sums: sums over earlier keys.
    """

    def body(sums: Sums, parts: tuple[Array, Keys]) -> tuple[Sums, tuple[Array, Array]]:
        query, key = parts
        sums = absorb(sums, jax.tree.map(lambda x: jnp.expand_dims(x, 2), key))
        numerator, denominator = read(query[:, :, :, None], sums)
        return sums, (numerator[:, :, :, 0], denominator[:, :, :, 0])

    tokens = (jnp.moveaxis(query, 3, 0), jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), keys))
    sums, both = jax.lax.scan(body, vary_as(sums, tokens), tokens)
    return *divide(*(jnp.moveaxis(x, 0, 3) for x in both)), sums


def _length(tokens: Any) -> int:
    return jax.tree.leaves(tokens)[0].shape[2]


def _runs(tokens: Any, size: int) -> Any:
    """Leaves `[B, K, length, ...]` as `[runs, B, K, size, ...]`, zero-padded at the end."""

    def cut(x: Array) -> Array:
        x = _pad(x, 0, -x.shape[2] % size)
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    return jax.tree.map(cut, tokens)


def _pad(x: Array, front: int, back: int) -> Array:
    """Zeros before and after `x [B, K, length, ...]`: absent tokens."""
    widths = [(0, 0)] * x.ndim
    widths[2] = (front, back)
    return jnp.pad(x, widths)


def aligned(tokens: Any, T: int, offset: int) -> tuple[Any, Any, Any]:
    """Splits keys into three parts: query t attends to the first and keys 0 .. t of the second.

    Args:
        tokens: S keys.
        T: number of queries.
        offset: keys up to t + offset are visible to query t.

    Returns:
        Keys visible to every query; T keys, zero-padded; keys visible to no query.
    """
    S = _length(tokens)
    first, last = min(max(offset, 0), S), min(max(offset + T, 0), S)
    front = min(max(-offset, 0), T)
    back = T - front - (last - first)

    def cut(start: int, stop: int) -> Any:
        return jax.tree.map(lambda x: x[:, :, start:stop], tokens)

    middle = jax.tree.map(lambda x: _pad(x, front, back), cut(first, last))
    return cut(0, first), middle, cut(last, S)
