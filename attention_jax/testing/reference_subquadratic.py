"""References of the sub-quadratic families: float64 NumPy, one query at a time.

Arrays are `[B, T, N, H]` and `[B, S, K, H or V]`, as for `attend`; `allowed` broadcasts to
`[B, N, T, S]`, and `real` `[B, S]` marks keys that are not padding. A query without keys gets 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Numbers = Any  # what np.asarray takes
RowFunction = Callable[[int, int, int, int, np.ndarray], Any]


def wide(*arrays: Numbers) -> list[np.ndarray]:
    """Return arrays in float64."""
    return [np.asarray(x, np.float64) for x in arrays]


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def rows(query: np.ndarray, value: np.ndarray, allowed: Numbers, row: RowFunction) -> np.ndarray:
    """Return `row(b, t, n, key/value head, indices of the visible keys)` of each query."""
    B, T, N, _ = query.shape
    S, K, V = value.shape[1:]
    allowed = np.broadcast_to(allowed, (B, N, T, S))
    out = np.zeros((B, T, N, V))
    for b, t, n in np.ndindex(B, T, N):
        (visible,) = np.nonzero(allowed[b, n, t])
        if len(visible):
            out[b, t, n] = row(b, t, n, n // (N // K), visible)
    return out


def dense(
    query: Numbers, key: Numbers, value: Numbers, allowed: Numbers, scale: Any = None
) -> np.ndarray:
    """Return softmax attention over the allowed pairs; the scale is 1/√H by default."""
    query, key, value = wide(query, key, value)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    def row(b: int, t: int, n: int, kv: int, visible: np.ndarray) -> np.ndarray:
        return softmax(scale * key[b, visible, kv] @ query[b, t, n]) @ value[b, visible, kv]

    return rows(query, value, allowed, row)


def linear(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    allowed: Numbers,
    features: Callable[[np.ndarray, np.ndarray], np.ndarray],
    start: int = 0,
) -> np.ndarray:
    """Return Σ φ(q)·φ(k) v over Σ φ(q)·φ(k); `features(x [length, H], positions)`."""
    query, key, value = wide(query, key, value)

    def row(b: int, t: int, n: int, kv: int, visible: np.ndarray) -> Any:
        q = features(query[b, t : t + 1, n], np.array([t + start]))
        weights = (features(key[b, visible, kv], visible) @ q.T)[:, 0]
        total = weights.sum()
        return weights @ value[b, visible, kv] / total if total else 0.0

    return rows(query, value, allowed, row)


def low_rank(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    real: Numbers,
    down_key: Numbers,
    down_value: Numbers,
) -> np.ndarray:
    """Return softmax attention to projected keys; the projections are `[K, M, S]`."""
    query, key, value, down_key, down_value = wide(query, key, value, down_key, down_value)

    def row(b: int, t: int, n: int, kv: int, at: np.ndarray) -> np.ndarray:
        enters = (down_key[kv][:, at] != 0).any(-1)
        keys = (down_key[kv][:, at] @ key[b, at, kv])[enters]
        values = (down_value[kv][:, at] @ value[b, at, kv])[enters]
        return softmax(keys @ query[b, t, n] / math.sqrt(query.shape[-1])) @ values

    return rows(query, value, real[:, None, None, :], row)


def memory_compressed(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    real: Numbers,
    allowed: Numbers,
    stride: int,
    kernels: Sequence[Numbers] | None = None,
) -> np.ndarray:
    """Return softmax attention to runs of `stride` keys, their mean or their convolution.

    A run is visible where all its keys are allowed; `allowed` includes causal order.
    """
    query, key, value = wide(query, key, value)
    S = key.shape[1]

    def row(b: int, t: int, n: int, kv: int, visible: np.ndarray) -> Any:
        keys, values = [], []
        for start in range(0, S, stride):
            members = [s for s in range(start, min(start + stride, S)) if real[b, s]]
            if not members or not set(members) <= set(visible):
                continue
            if kernels is None:
                keys.append(key[b, members, kv].mean(0))
                values.append(value[b, members, kv].mean(0))
            else:
                w_key, w_value = wide(*kernels)
                keys.append(sum(key[b, s, kv] @ w_key[s - start] for s in members))
                values.append(sum(value[b, s, kv] @ w_value[s - start] for s in members))
        if not keys:
            return 0.0
        weights = softmax(np.stack(keys) @ query[b, t, n] / math.sqrt(query.shape[-1]))
        return weights @ np.stack(values)

    return rows(query, value, allowed, row)


def newton_inverse(matrix: np.ndarray) -> np.ndarray:
    """Return the pseudo-inverse by six steps of the iteration of Nyström attention."""
    z = matrix.T / np.abs(matrix).sum(0).max() / np.abs(matrix).sum(1).max()
    one = np.eye(len(matrix))
    for _ in range(6):
        p = matrix @ z
        z = z @ (13 * one - p @ (15 * one - p @ (7 * one - p))) / 4
    return z


def nystrom(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    real: Numbers,
    count: int,
    query_real: np.ndarray | None = None,
    inverse: Callable[[np.ndarray], np.ndarray] = np.linalg.pinv,
) -> np.ndarray:
    """Return the product of three softmaxes; landmarks average the queries of `query_real`."""
    query, key, value = wide(query, key, value)
    B, T, N, H = query.shape
    K, V = value.shape[2:]
    query_real = np.ones((B, T), bool) if query_real is None else query_real
    out = np.zeros((B, T, N, V))
    for b, n in np.ndindex(B, N):
        kv = n // (N // K)
        if not real[b].any():
            continue
        keys, values = key[b, real[b], kv], value[b, real[b], kv]
        q = query[b, :, n] / math.sqrt(H)
        few_q, few_k = means(q[query_real[b]], count), means(keys, count)
        middle = inverse(softmax(few_q @ few_k.T))
        out[b, :, n] = softmax(q @ few_k.T) @ middle @ softmax(few_q @ keys.T) @ values
    return out


def means(x: np.ndarray, count: int) -> np.ndarray:
    """Return the means of `count` runs of rows."""
    count = min(count, len(x))
    run = np.arange(len(x)) * count // len(x)
    return np.stack([x[run == i].mean(0) for i in range(count)])


def hash_buckets(query: Numbers, directions: Numbers) -> np.ndarray:
    """Return the buckets `[R, B, N, T]` of `query` by `directions` `[R, N, H, half]`."""
    along = np.einsum("btnh,rnhd->rbntd", *wide(query, directions))
    return np.concatenate([along, -along], -1).argmax(-1)


def lsh(
    query: Numbers,
    value: Numbers,
    allowed: Numbers,
    buckets: np.ndarray,
    window: int,
    normalize: bool = True,
) -> np.ndarray:
    """Return attention to the other tokens of the buckets `[R, B, N, T]`, to itself if alone.

    `allowed` includes each token's own key.
    """
    query, value = wide(query, value)
    B, T, N, H = query.shape
    allowed = np.broadcast_to(allowed, (B, N, T, T))
    key = query / np.linalg.norm(query, axis=-1, keepdims=True) if normalize else query
    value = np.repeat(value, N // value.shape[2], axis=2)
    real = allowed.any(axis=2)

    def row(b: int, t: int, n: int, kv: int, visible: np.ndarray) -> Any:
        chosen = set()
        for bucket in buckets[:, b, n]:
            # Tokens of the bucket: the visible ones by index, and the others behind them.
            inside = [s for s in range(T) if bucket[s] == bucket[t]]
            order = sorted(inside, key=lambda s: (not real[b, n, s], s))
            here = order.index(t)
            chosen |= {s for i, s in enumerate(order) if abs(i - here) <= window and s in visible}
        others = sorted(chosen - {t})
        if not others:
            return value[b, t, n] if t in visible else 0.0
        weights = softmax(key[b, others, n] @ query[b, t, n] / math.sqrt(H))
        return weights @ value[b, others, n]

    return rows(query, value, allowed, row)


def routed(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    real: Numbers,
    size: int,
    count: int,
    causal: bool,
) -> np.ndarray:
    """Return attention to the `count` blocks whose means score best; T = S in causal order."""
    query, key, value = wide(query, key, value)
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    nT, nS = -(-T // size), -(-S // size)
    query_real = real if T == S else np.ones((B, T), bool)
    allowed = np.zeros((B, N, T, S), bool)
    for b, n, i in np.ndindex(B, N, nT):
        mine = np.arange(i * size, min((i + 1) * size, T))
        members = [t for t in (mine[:1] if causal else mine) if query_real[b, t]]
        q = query[b, members, n].mean(0) if members else np.zeros(query.shape[-1])
        scores = []
        for j in range(nS):
            block = [s for s in range(j * size, min((j + 1) * size, S)) if real[b, s]]
            if (causal and (j > i or (j < i and not block))) or (not causal and not block):
                continue
            mean = key[b, block, n // (N // K)].mean(0) if block else 0 * q
            scores.append((math.inf if causal and j == i else q @ mean, -j, block))
        for _, _, block in sorted(scores, reverse=True)[:count]:
            for t in mine:
                allowed[b, n, t, [s for s in block if not causal or s <= t]] = True
    return dense(query, key, value, allowed)
