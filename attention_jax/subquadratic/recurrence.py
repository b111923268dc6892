"""The sums that linear attention is made of, in three orders of the same additions.

    numerator_t = Σ_s (φ(q_t) · φ(k_s)) v_s,   denominator_t = Σ_s φ(q_t) · φ(k_s)

Arrays are `[B, K, ...]`, queries `[B, K, G, T, F]`. Keys may carry the logarithm of a factor; sums
are then kept relative to the largest seen so far, as in an online softmax, so nothing overflows and
nothing that a query sees vanishes because of a key that it does not see.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.manual import vary_as

# The logarithm of the factor of what is not there; finite, so that differences are numbers.
LOWEST = -1e30


class Sums(NamedTuple):
    """What is known of the keys so far: `numerator [B, K, F, V]`, `denominator [B, K, F]`.

    Both are relative to `exp(shift [B, K])`.
    """

    numerator: Array
    denominator: Array
    shift: Array


class Keys(NamedTuple):
    """`features [B, K, S, F]`, `value [B, K, S, V]` and, or None, log factors `scale [B, K, S]`."""

    features: Array
    value: Array
    scale: Array | None

    def cut(self, start: int, stop: int) -> "Keys":
        """Keys start .. stop - 1."""
        return jax.tree.map(lambda x: x[:, :, start:stop], self)


def read(query: Array, sums: Sums) -> tuple[Array, Array]:
    """Numerator and denominator of `query [B, K, G, t, F]` over everything in the sums."""
    numerator = jnp.einsum("bkgtf,bkfv->bkgtv", query, sums.numerator)
    return numerator, jnp.einsum("bkgtf,bkf->bkgt", query, sums.denominator)


def absorb(sums: Sums, keys: Keys) -> Sums:
    """The sums, and these keys as well."""
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
    """Numerator and denominator by forming every pair: O(t·s).

    Args:
        query: `[B, K, G, t, F]`.
        keys: s keys.
        sums: what went before and is seen by every query.
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
        # Each row has its own reference: what it does not see cannot move it, not even by a bit.
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


def absorb_in_order(sums: Sums, keys: Keys, size: int) -> Sums:
    """`absorb`, `size` keys at a time."""
    if keys.features.shape[2] <= size:
        return absorb(sums, keys) if keys.features.shape[2] else sums

    def body(sums: Sums, keys: Keys) -> tuple[Sums, None]:
        return absorb(sums, keys), None

    return jax.lax.scan(jax.checkpoint(body), vary_as(sums, keys), _runs(keys, size))[0]


def chunks(query: Array, keys: Keys, sums: Sums, size: int) -> tuple[Array, Array, Sums]:
    """Query t over the sums and keys 0 .. t, `size` at a time: pairs inside a chunk, sums before.

    Args:
        query: `[B, K, G, T, F]`.
        keys: T keys.
        sums: what went before.
        size: length of a chunk.

    Returns:
        Numerator `[B, K, G, T, V]`, denominator `[B, K, G, T]`, and the sums over all keys.
    """
    T = query.shape[3]
    size = max(1, min(size, T))
    lower = np.tril(np.ones((size, size), np.bool_))

    def body(sums: Sums, parts: tuple[Array, Keys]) -> tuple[Sums, tuple[Array, Array]]:
        queries, keys = parts
        return absorb(sums, keys), together(queries, keys, sums, lower)

    runs = _runs((jnp.moveaxis(query, 2, -1), keys), size)
    runs = (jnp.moveaxis(runs[0], -1, 3), runs[1])
    sums, both = jax.lax.scan(jax.checkpoint(body), vary_as(sums, (query, keys)), runs)
    numerator, denominator = (
        jnp.moveaxis(x, 0, 3).reshape(*query.shape[:3], -1, *x.shape[5:])[:, :, :, :T] for x in both
    )
    return numerator, denominator, sums


def steps(query: Array, keys: Keys, sums: Sums) -> tuple[Array, Array, Sums]:
    """As `chunks`, one token at a time: write its key into the sums, then read them."""

    def body(sums: Sums, parts: tuple[Array, Keys]) -> tuple[Sums, tuple[Array, Array]]:
        query, key = parts
        sums = absorb(sums, jax.tree.map(lambda x: jnp.expand_dims(x, 2), key))
        numerator, denominator = read(query[:, :, :, None], sums)
        return sums, (numerator[:, :, :, 0], denominator[:, :, :, 0])

    tokens = (jnp.moveaxis(query, 3, 0), jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), keys))
    sums, both = jax.lax.scan(body, vary_as(sums, tokens), tokens)
    numerator, denominator = (jnp.moveaxis(x, 0, 3) for x in both)
    return numerator, denominator, sums


def _runs(tree: Any, size: int) -> Any:
    """Leaves `[B, K, length, ...]` as `[runs, B, K, size, ...]`, with nothing at the end."""

    def cut(x: Array) -> Array:
        x = _pad(x, 0, -x.shape[2] % size)
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *x.shape[3:]), 2, 0)

    return jax.tree.map(cut, tree)


def _pad(x: Array, front: int, back: int) -> Array:
    """Nothing before and after `x [B, K, length, ...]`: no features, and no factor."""
    widths = [(0, 0)] * x.ndim
    widths[2] = (front, back)
    return jnp.pad(x, widths, constant_values=LOWEST if x.ndim == 3 else 0)


def aligned(keys: Keys, T: int, offset: int) -> tuple[Keys, Keys, Keys]:
    """Keys in three parts, so that query t sees the first part and 0 .. t of the second.

    Args:
        keys: S keys.
        T: how many queries.
        offset: query t sees keys up to t + offset.

    Returns:
        Keys that every query sees; T keys, some of them nothing; keys that no query sees.
    """
    S = keys.features.shape[2]
    first, last = min(max(offset, 0), S), min(max(offset + T, 0), S)
    front = min(max(-offset, 0), T)
    back = T - front - (last - first)
    middle = jax.tree.map(lambda x: _pad(x, front, back), keys.cut(first, last))
    return keys.cut(0, first), middle, keys.cut(last, S)
