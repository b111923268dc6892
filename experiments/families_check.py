"""What each pattern and family should give, in float64 NumPy: nothing is timed that is wrong.

patterns            softmax over what the mask's array lets through
linear              φ(q) · φ(k), divided by its sum over the keys
low rank            softmax over projected keys; memory-compressed: over means of runs
nystrom             the three factors, with the same iteration for the pseudo-inverse
routed              softmax over the blocks with the best products of means
lsh                 with one bucket: softmax over all others, keys of length 1
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attention_jax import subquadratic
from experiments import families

# Relative to the largest entry: float32, sums of some hundred terms.
TOLERANCE = 1e-4
# The pseudo-inverse divides by small numbers.
LOOSER = {"nystrom": 1e-2}


def check(name: str, out: Any, arguments: tuple[Any, ...], reach: int) -> str | None:
    """Return what is wrong with ``out``, or None.

    Args:
        name: one of `families.MAKERS`.
        out: what its function gave for ``arguments``, at a moderate length.
        arguments: as of `families.arguments`.
        reach: as in `families`.
    """
    query, key, value, *extra = (np.asarray(x, np.float64) for x in arguments)
    if name == "lsh":
        value = value.astype(np.float32)
        out = jax.jit(lambda q, v: subquadratic.lsh_attention(q, v, families.KEY, num_buckets=1))(
            arguments[0], arguments[2]
        )
    wanted = np.stack(
        [
            _head(name, query[0, :, n], key[0, :, n], value[0, :, n], extra, reach)
            for n in range(query.shape[2])
        ],
        axis=1,
    )[None]
    error = float(np.max(np.abs(np.asarray(out, np.float64) - wanted)) / np.max(np.abs(wanted)))
    within = error <= LOOSER.get(name, TOLERANCE)
    return None if within else f"out is off by {error:.1e} of its largest entry"


def _head(
    name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, extra: list[np.ndarray], reach: int
) -> np.ndarray:
    length, depth = q.shape
    scores = q @ k.T * depth**-0.5
    if name == "full":
        return softmax(scores) @ v
    if name in families.PATTERNS:
        mask = families.PATTERNS[name](length, reach, families.KEY)
        seen = np.asarray(mask.to_array(length, length)).reshape(length, length)
        return softmax(np.where(seen, scores, -np.inf)) @ v
    if name.startswith("linear"):
        weights = _FEATURES[name](q, depth) @ _FEATURES[name](k, depth).T
        total = weights.sum(axis=1, keepdims=True)
        return weights @ v / np.where(total > 0, total, 1)  # a query may share no feature: 0
    if name == "low-rank":
        return softmax(q @ (extra[0] @ k).T * depth**-0.5) @ (extra[1] @ v)
    if name == "memory-compressed":
        starts = range(0, length, families.COMPRESSION)
        runs = [slice(s, s + families.COMPRESSION) for s in starts]
        few_k, few_v = (np.stack([x[run].mean(axis=0) for run in runs]) for x in (k, v))
        return softmax(q @ few_k.T * depth**-0.5) @ few_v
    if name == "lsh":
        k = q / np.linalg.norm(q, axis=1, keepdims=True)
        scores = q @ k.T * depth**-0.5
        np.fill_diagonal(scores, -np.inf)
        return softmax(scores) @ v
    return {"nystrom": _nystrom, "routed": _routed}[name](q * depth**-0.5, k, v, reach)


def _favor(x: np.ndarray, depth: int) -> np.ndarray:
    features: Any = families.favor(depth)
    x = x * depth**-0.25
    return np.exp(x @ np.asarray(features.projection, np.float64).T - (x**2).sum(1)[:, None] / 2)


def _cosine(x: np.ndarray, depth: int) -> np.ndarray:
    angle = np.pi * np.arange(len(x))[:, None] / (2 * len(x))
    x = np.maximum(x, 0)
    return np.concatenate([x * np.cos(angle), x * np.sin(angle)], axis=1)


_FEATURES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "linear-elu": lambda x, depth: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "linear-relu": lambda x, depth: np.maximum(x, 0) + 1e-3,
    "linear-cosine": _cosine,
    "linear-favor": _favor,
}


def _nystrom(q: np.ndarray, k: np.ndarray, v: np.ndarray, reach: int) -> np.ndarray:
    count = min(families.landmarks(reach), len(q))
    run = np.arange(len(q)) * count // len(q)
    few_q, few_k = (np.stack([x[run == i].mean(axis=0) for i in range(count)]) for x in (q, k))
    middle, one = softmax(few_q @ few_k.T), np.eye(count)
    z = middle.T / (middle.sum(axis=0).max() * middle.sum(axis=1).max())
    for _ in range(6):
        product = middle @ z
        z = z @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return softmax(q @ few_k.T) @ z @ softmax(few_q @ k.T) @ v


def _routed(q: np.ndarray, k: np.ndarray, v: np.ndarray, reach: int) -> np.ndarray:
    size = reach // 4
    blocks = np.arange(len(q)) // size
    means = [np.stack([x[blocks == i].mean(axis=0) for i in range(blocks[-1] + 1)]) for x in (q, k)]
    best = np.argsort(-(means[0] @ means[1].T), axis=1)[:, :4]
    seen = (best[blocks][:, :, None] == blocks).any(axis=1)
    return softmax(np.where(seen, q @ k.T, -np.inf)) @ v


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of rows, 0 in a row with nothing to see."""
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total > 0, total, 1)
