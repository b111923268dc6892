"""LSH attention: a token attends to tokens in the same hash bucket, found by sorting."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import MaskLike, Query, Size, Value
from attention_jax._core.checks import as_array, check_count, check_inputs, check_known
from attention_jax._core.compiled import compiled
from attention_jax._core.mesh_axes import vary_as
from attention_jax._core.numerics import safe_normalize, widen
from attention_jax.masks.mask import Mask
from attention_jax.softmax import log_sum_exp
from attention_jax.subquadratic.few import scaled
from attention_jax.subquadratic.problem import (
    NEVER,
    Problem,
    Weighed,
    canonical,
    empty_output,
    finish,
    weigh,
)
from attention_jax.subquadratic.visibility import mask_object

# Target size of a bucket for `num_buckets=None`.
_BUCKET = 64


def lsh_attention(
    query: Query,
    value: Value,
    hash_key: Any,
    *,
    num_buckets: int | tuple[int, ...] | None = None,
    num_rounds: int = 1,
    window: int | None = None,
    normalize_keys: bool = True,
    mask: Mask | MaskLike | None = None,
    scale: Any = None,
) -> Float[Array, "*B T N V"]:
    """LSH attention: shared queries and keys, within buckets of a random hash, O(T log T).

        out_t = Σ_{s in P_t} softmax_s(scale · q_t · k_s) v_s,   k_s = q_s / |q_s|

    A token's bucket is the nearest of a set of random directions and their opposites. P_t is the
    set of tokens that in some round are in t's bucket, at most `window` tokens of the bucket away.
    It excludes t itself, unless it is empty otherwise: then t has weight 1.

    Chunks do not affect visibility. In Reformer visibility is defined by chunks of the sorted
    sequence, so a later token changes the visible keys of earlier ones; here causal order is
    strict.

    Args:
        query: shared queries and keys, `[*B, T, N, H]`, floating.
        value: `[*B, T, K, V]`; query head n uses value head n // (N // K).
        hash_key: a PRNG key, for the hashes of all heads and rounds.
        num_buckets: 1 or an even number; or a tuple of even numbers, which combines several smaller
            hashes into as many buckets as their product, at a lower cost. None makes buckets of 64
            to 128 tokens.
        num_rounds: number of hashes, at least 1. P_t is the union over rounds; each pair counts
            once.
        window: visible tokens of the same bucket on each side, at least 1; None is twice the mean
            size of a bucket, and so all tokens if there is one bucket.
        normalize_keys: whether keys are normalised to length 1, as in Reformer.
        mask: causal order and padding, as in `linear_attention`; T = S. A masked token is visible
            to no query and does not count in a window.
        scale: factor of the scores, a number, a scalar array or `[N]`; None is 1/√H.

    Returns:
        `[*B, T, N, V]` with the query's dtype; 0 for rows without any visible key.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, an odd number of buckets above 1, or a mask other than
            causal order and padding.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jax.random.normal(jax.random.key(0), (2, 300, 4, 8))
        >>> aj.subquadratic.lsh_attention(x, x, jax.random.key(1), num_buckets=8).shape
        (2, 300, 4, 8)

    References:
        Kitaev, Kaiser, Levskaya 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451,
        §2, eq. 4 (buckets), eq. 5 (sorted chunks), eq. 6 (rounds).
        Andoni et al. 2015, "Practical and Optimal LSH for Angular Distance", arXiv:1509.02897, §3.
    """
    mask = mask_object(mask)
    query, value = as_array("query", query), as_array("value", value)
    factors = _factors(num_buckets, query.shape[-3] if query.ndim > 2 else 1)
    check_count("num_rounds", num_rounds, 1)
    if window is not None:
        check_count("window", window, 1)
    sizes = (factors, num_rounds, window)
    return _run(query, value, hash_key, mask, scale, *sizes, normalize_keys)


def _factors(num_buckets: Any, length: Size) -> tuple[int, ...]:
    """The sizes of the hashes that form a bucket, 1 or even."""
    check_known("lsh_attention", T=length)
    if num_buckets is None:
        bits = max(length // _BUCKET, 1).bit_length() - 1
        return (2**bits,) if bits < 5 else (2 ** (bits - bits // 2), 2 ** (bits // 2))
    factors = num_buckets if isinstance(num_buckets, tuple) else (num_buckets,)
    for size in factors:
        check_count("num_buckets", size, 1)
    if any(size % 2 for size in factors) and factors != (1,):
        raise ValueError(f"num_buckets must be 1, even, or a tuple of these, got {num_buckets}")
    return factors


class Order(NamedTuple):
    """The sorted order of tokens in one round, per head.

    Attributes:
        bucket: int32 `[B, N, T]`.
        token: int32 `[B, N, T]`, the tokens sorted by bucket; within a bucket unmasked tokens come
            first, then by index.
        rank: int32 `[B, N, T]`, the index of each token in the sorted order.
    """

    bucket: Array
    token: Array
    rank: Array


@functools.partial(compiled, static=(5, 6, 7, 8))
def _run(
    query: Any,
    value: Any,
    hash_key: Any,
    mask: Any,
    scale: Any,
    num_buckets: tuple[int, ...],
    num_rounds: int,
    window: int | None,
    normalize_keys: bool,
) -> Array:
    shared = check_inputs(query, value, value).group
    if query.shape[-3] != value.shape[-3]:
        raise ValueError(
            f"query length {query.shape[-3]} and value length {value.shape[-3]} must match: "
            "queries are the keys"
        )
    value = jnp.repeat(widen(value), shared, axis=-2)
    problem = canonical("lsh_attention", query, query, value, mask)
    empty = empty_output(problem)
    if empty is not None:
        return empty
    T = problem.layout.T
    if window is None:
        window = 2 * -(-T // math.prod(num_buckets))
    window = min(window, T)
    orders = _orders(problem, hash_key, num_buckets, num_rounds)
    keys = safe_normalize(problem.query) if normalize_keys else problem.query
    problem = problem._replace(query=scaled(problem.query, scale), key=keys)

    def one(order: Order) -> Weighed:
        return _round(problem, order, orders, window)

    each = jax.lax.map(jax.checkpoint(one), orders) if num_rounds > 1 else one_of(one, orders)
    outs, lses, non_finite = each  # [R, B, N, T, ...]
    others, shares = log_sum_exp(lses, None, axis=0)
    out = jnp.sum(jnp.where((shares > 0)[..., None], shares[..., None] * outs, 0), axis=0)
    alone = others == -jnp.inf
    own_visible = _own_key_visible(problem)
    out = jnp.where((alone & own_visible)[..., None], problem.value, out)
    non_finite = jnp.any(non_finite, axis=0)
    non_finite |= (alone & own_visible)[..., None] & problem.bad_value
    return finish(problem, out, non_finite, ~alone | own_visible)


def one_of(function: Any, tree: Any) -> Any:
    """`lax.map` over an axis of size 1, without a loop."""
    out = function(jax.tree.map(lambda x: x[0], tree))
    return jax.tree.map(lambda x: x[None], out)


def _own_key_visible(problem: Problem) -> Array:
    """Whether a token's own key is unmasked for its query, bool `[B, N, T]`."""
    index = jnp.arange(problem.layout.T, dtype=jnp.int32)
    own = (problem.reach >= index)[None, None]
    own = jnp.broadcast_to(own, problem.query.shape[:3])
    return own if problem.key_mask is None else own & problem.key_mask


def _orders(
    problem: Problem, hash_key: Any, num_buckets: tuple[int, ...], num_rounds: int
) -> Order:
    """The orders of all rounds, `[R, B, N, T]`."""
    x = jax.lax.stop_gradient(problem.query)
    B, N, T, H = x.shape
    shape = (num_rounds, N, H, sum(num_buckets) // 2)
    directions = jax.random.normal(hash_key, shape, jnp.float32).astype(x.dtype)
    bucket, first = jnp.zeros((num_rounds, B, N, T), jnp.int32), 0
    for size in num_buckets:
        if size > 1:
            along = jnp.einsum("bnth,rnhd->rbntd", x, directions[..., first : first + size // 2])
            nearest = jnp.argmax(jnp.abs(along), axis=-1, keepdims=True).astype(jnp.int32)
            ahead = jnp.take_along_axis(along, nearest, axis=-1)[..., 0] > 0
            bucket = bucket * size + nearest[..., 0] + jnp.where(ahead, 0, size // 2)
            first += size // 2
    kind = 2 * bucket
    if problem.key_mask is not None:
        # Fully masked tokens sort last, so their contents do not change the order of the others.
        queries = ~problem.bad_query
        if problem.query_mask is not None:
            queries = queries & problem.query_mask
        kind = kind + jnp.where(problem.key_mask, 0, 1)[None]
        kind = jnp.where(problem.key_mask | queries, kind, 2 * math.prod(num_buckets))
    token = _sorted(kind, 2 * math.prod(num_buckets) + 1)
    rank = _sorted(token, T)
    return Order(bucket, token, rank)


def _sorted(kind: Array, kinds: int) -> Array:
    """Indices along the last axis, sorted by `kind` (0 .. kinds - 1), then by index."""
    T = kind.shape[-1]
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), kind.shape)
    if kinds * T < NEVER:  # one sort key instead of two is ten times as fast
        return jnp.sort(kind * T + index, axis=-1) % T
    return jax.lax.sort((kind, index), num_keys=1)[1]


def _round(problem: Problem, order: Order, orders: Order, window: int) -> Weighed:
    """One round, `[B, N, T, ...]`; a pair in several rounds has a fraction of its weight in each.

    A scan over chunks of the sorted tokens. It carries the keys of the neighbouring chunks, so keys
    are not duplicated per neighbour.
    """
    T = problem.layout.T
    chunks = -(-T // window)
    # In causal order the next chunk only holds masked keys or other buckets.
    behind = chunks > 1 and (problem.mask.offset is None or problem.mask.offset > 0)
    shape = order.rank.shape

    def sort(x: Array) -> Array:
        # A single chunk contains all pairs and needs no sorting.
        return _chunk(_at(x, order.token), window, chunks) if chunks > 1 else x[None]

    seen = jnp.ones(shape, bool)
    if problem.key_mask is not None:
        seen = jnp.broadcast_to(problem.key_mask, shape)
    tokens = {
        "index": sort(jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), shape)),
        "own": sort(jnp.stack([order.bucket, order.rank], axis=-1)),
    }
    if orders.bucket.shape[0] > 1:
        per_round = jnp.stack([orders.bucket, orders.rank], axis=-1)
        tokens["rounds"] = sort(jnp.moveaxis(per_round, 0, -2))
    bad = problem.bad_value | problem.bad_key[..., None]
    any_bad = jnp.any(bad)
    # Non-finite values are marked as NaN, which `chunk` replaces before the product.
    values = jnp.where(bad, jnp.nan, problem.value)
    keys = {**tokens, "seen": sort(seen), "key": sort(problem.key), "value": sort(values)}
    queries = {**tokens, "query": sort(problem.query)}
    queries["reach"] = sort(jnp.broadcast_to(problem.reach, shape))

    def chunk(before: list[Any], parts: tuple[Any, Any]) -> tuple[list[Any], Weighed]:
        query, last = parts
        near = [*before, last]
        key = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *near)
        logits = jnp.einsum("bnth,bnsh->bnts", query["query"], key["key"])
        visible = _same_bucket(query["own"], key["own"], window)
        if "rounds" in key:
            count = _same_bucket(query["rounds"], key["rounds"], window, rounds=True)
            logits = logits - jnp.log(jnp.maximum(count, 1).astype(logits.dtype))
        t, s = query["index"][..., :, None], key["index"][..., None, :]
        visible &= key["seen"][..., None, :] & (t != s) & (s <= query["reach"][..., None])
        bad = jnp.isnan(key["value"])
        value = jnp.where(bad, 0, key["value"])
        return near[1:], weigh(logits, visible, value, bad, any_bad)

    first = jax.tree.map(lambda x: x[0], keys)
    blank = jax.tree.map(jnp.zeros_like, first)
    before = [blank] * min(chunks - 1, 1)
    if behind:
        before.append(first)
        keys = jax.tree.map(lambda x: jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]), keys)
    _, each = jax.lax.scan(jax.checkpoint(chunk), vary_as(before, keys), (queries, keys))

    def back(x: Array) -> Array:
        """From sorted chunks to the original order."""
        if chunks == 1:
            return x[0]
        x = jnp.moveaxis(x, 0, 2).reshape(*shape[:2], -1, *x.shape[4:])
        return _at(x, order.rank)

    return jax.tree.map(back, each)


def _at(x: Array, index: Array) -> Array:
    """`x [B, N, length, ...]` at `index [B, N, T]`, which must be in range."""
    index = index.reshape(index.shape + (1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=2, mode="promise_in_bounds")


def _chunk(x: Array, window: int, chunks: int) -> Array:
    """`[B, N, T, ...]` as `[chunks, B, N, window, ...]`; the padding is masked."""
    widths = [(0, chunks * window - x.shape[2] if axis == 2 else 0) for axis in range(x.ndim)]
    x = jnp.pad(x, widths)
    return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, window, *x.shape[3:]), 2, 0)


def _same_bucket(query: Array, key: Array, window: int, *, rounds: bool = False) -> Array:
    """Whether pairs share a bucket within the window; with `rounds`, in how many rounds.

    Entries are (bucket, rank), `[..., t, 2]` and `[..., s, 2]`, or `[..., t, R, 2]` with `rounds`.
    """
    if rounds:
        query, key = query[..., :, None, :, :], key[..., None, :, :, :]
    else:
        query, key = query[..., :, None, :], key[..., None, :, :]
    same = query[..., 0] == key[..., 0]
    near = jnp.abs(query[..., 1] - key[..., 1]) <= np.int32(window)
    both = same & near
    return jnp.sum(both, axis=-1, dtype=jnp.int32) if rounds else both
