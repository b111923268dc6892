"""The patterns and sub-quadratic families, as functions to time and as layers to train.

A size is a length T and a ``reach``, the approximate number of keys per query. Patterns are masks
of exact attention; families are other computations. `MAKERS` contains functions of query, key and
value to time; `layer` returns options of a Transformer layer to train.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax import masks, nnx, subquadratic
from attention_jax.masks import Mask
from attention_jax.testing import reference_subquadratic as references

Function = Callable[..., Any]
KEY = jax.random.key(7)
COMPRESSION = 4  # keys made into one by "memory-compressed"


def grid(length: int) -> tuple[int, int]:
    """Return the grid of ``length`` cells that is nearest to a square, its longer side last."""
    rows = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return rows, length // rows


def landmarks(reach: int) -> int:
    """Return how many landmarks "nystrom" has."""
    return max(reach // 4, 8)


def _strided(length: int) -> Mask:
    stride = max(math.isqrt(length), 1)
    return masks.local(2 * stride) | masks.strided(stride)


# The mask of each pattern: of the length, the reach and a PRNG key.
PATTERNS: dict[str, Callable[[int, int, Any], Mask]] = {
    "window": lambda length, reach, key: masks.local(reach),
    "block-diagonal": lambda length, reach, key: masks.block_diagonal(reach),
    "dilated": lambda length, reach, key: masks.dilated(reach, 2),
    "strided": lambda length, reach, key: _strided(length),
    "random": lambda length, reach, key: masks.random(key, length, reach // 4, 4),
    "prefix": lambda length, reach, key: masks.prefix(reach),
    "global": lambda length, reach, key: masks.global_tokens(reach // 4),
    "longformer": lambda length, reach, key: masks.longformer(reach, reach // 4),
    "bigbird": lambda length, reach, key: masks.bigbird(key, length, reach // 4),
    "axial": lambda length, reach, key: masks.axial(grid(length), 0),
}


def _masked(name: str) -> Callable[[int, int, int], Function]:
    def make(length: int, reach: int, depth: int) -> Function:
        return functools.partial(aj.attend, mask=PATTERNS[name](length, reach, KEY))

    return make


def _linear(features: Callable[[int, int], Any]) -> Callable[[int, int, int], Function]:
    def make(length: int, reach: int, depth: int) -> Function:
        return functools.partial(subquadratic.linear_attention, feature_map=features(length, depth))

    return make


def _axial(length: int, reach: int, depth: int) -> Function:
    return lambda q, k, v: aj.axial_attention(q, k, v, grid(length), 0)


def _nystrom(length: int, reach: int, depth: int) -> Function:
    return functools.partial(subquadratic.nystrom_attention, num_landmarks=landmarks(reach))


def _routed(length: int, reach: int, depth: int) -> Function:
    sizes = {"block_size": reach // 4, "num_blocks": 4}
    return functools.partial(subquadratic.routed_attention, **sizes)


def favor(depth: int, key: Any = KEY) -> Any:
    """Return the random features of "linear-favor"."""
    return subquadratic.favor_features(key, depth, 4 * depth)


# The functions to time, in the order of the tables: of length, reach and head depth.
MAKERS: dict[str, Callable[[int, int, int], Function]] = {
    "full": lambda length, reach, depth: functools.partial(aj.attend, implementation="flash"),
    **{name: _masked(name) for name in PATTERNS if name != "axial"},
    "axial": _axial,
    "linear-elu": _linear(lambda length, depth: subquadratic.elu_features()),
    "linear-relu": _linear(lambda length, depth: subquadratic.relu_features(1e-3)),
    "linear-cosine": _linear(lambda length, depth: subquadratic.cosine_features(length)),
    "linear-favor": _linear(lambda length, depth: favor(depth)),
    "low-rank": lambda length, reach, depth: subquadratic.low_rank_attention,
    "nystrom": _nystrom,
    "memory-compressed": lambda length, reach, depth: (
        lambda q, k, v: subquadratic.memory_compressed_attention(q, k, v, COMPRESSION)
    ),
    "lsh": lambda length, reach, depth: lambda q, k, v: subquadratic.lsh_attention(q, v, KEY),
    "routed": _routed,
}


def arguments(
    name: str, length: int, reach: int, *, heads: int, depth: int, seed: int
) -> tuple[jax.Array, ...]:
    """Return query, key and value ``[1, T, N, H]`` ~ N(0, 1), and "low-rank"'s projections."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(1, length, heads, depth)] * 3
    if name == "low-rank":
        shapes += [(reach, length)] * 2
    drawn = [rng.normal(size=shape) for shape in shapes]
    drawn[3:] = [x / length**0.5 for x in drawn[3:]]
    return tuple(jnp.asarray(x, jnp.float32) for x in drawn)


def layer(name: str, length: int, reach: int, head_depth: int) -> Callable[[int], dict[str, Any]]:
    """Return the options of a `TransformerEncoderLayer` with this attention, by its number.

    Random choices differ from layer to layer; "axial" takes one axis of the grid after the other.
    """
    families: dict[str, Callable[[Any], Any]] = {
        "linear-elu": lambda key: nnx.LinearAttention,
        "linear-relu": lambda key: functools.partial(
            nnx.LinearAttention, feature_map=subquadratic.relu_features(1e-3)
        ),
        "linear-cosine": lambda key: functools.partial(
            nnx.LinearAttention, feature_map=subquadratic.cosine_features(length)
        ),
        "linear-favor": lambda key: functools.partial(
            nnx.LinearAttention, feature_map=favor(head_depth, key)
        ),
        "low-rank": lambda key: functools.partial(
            nnx.LowRankAttention, length=length, rank=reach
        ),
        "nystrom": lambda key: functools.partial(
            nnx.NystromAttention, num_landmarks=landmarks(reach)
        ),
        "memory-compressed": lambda key: functools.partial(
            nnx.MemoryCompressedAttention, stride=COMPRESSION
        ),
        "lsh": lambda key: functools.partial(
            nnx.LSHAttention, num_buckets=2 * max(length // reach, 1), num_rounds=2
        ),
        "routed": lambda key: functools.partial(
            nnx.RoutedAttention, block_size=reach // 4, num_blocks=4
        ),
    }  # fmt: skip

    def options(index: int) -> dict[str, Any]:
        key = jax.random.fold_in(KEY, index)
        if name == "axial":
            return {"mask": masks.axial(grid(length), index % 2)}
        if name in PATTERNS:
            return {"mask": PATTERNS[name](length, reach, key)}
        return {"attention": families[name](key)} if name in families else {}

    return options


def fault(name: str, out: Any, given: tuple[Any, ...], reach: int) -> str | None:
    """Return how ``out`` differs from float64 NumPy, or None.

    Args:
        name: one of `MAKERS`.
        out: the result of its function for ``given``, at a moderate length.
        given: as of `arguments`.
        reach: as of `arguments`.
    """
    wanted = _expected(name, *given, reach=reach)
    error = float(np.max(np.abs(np.asarray(out, np.float64) - wanted)) / np.max(np.abs(wanted)))
    # float32, sums of some hundred terms; the pseudo-inverse divides by small numbers
    within = error <= (1e-2 if name == "nystrom" else 1e-4)
    return None if within else f"out is off by {error:.1e} of its largest entry"


def _expected(name: str, query: Any, key: Any, value: Any, *extra: Any, reach: int) -> np.ndarray:
    length = query.shape[1]
    qkv, seen = (query, key, value), np.ones((1, length), bool)
    if name == "full":
        return references.dense(*qkv, True)
    if name in PATTERNS:
        mask = PATTERNS[name](length, reach, KEY).to_array(length, length)
        return references.dense(*qkv, np.asarray(mask))
    if name.startswith("linear"):
        return references.linear(*qkv, True, functools.partial(_features, name, length))
    if name == "lsh":  # one bucket of all tokens, at this length
        buckets = np.zeros((1, 1, query.shape[2], length), int)
        return references.lsh(query, value, True, buckets, length)
    if name == "routed":
        return references.routed(*qkv, seen, reach // 4, 4, causal=False)
    if name == "nystrom":
        count, inverse = landmarks(reach), references.newton_inverse
        return references.nystrom(*qkv, seen, count, inverse=inverse)
    if name == "memory-compressed":
        return references.memory_compressed(*qkv, seen, True, COMPRESSION)
    heads = query.shape[2]
    return references.low_rank(*qkv, seen, *(np.stack([np.asarray(x)] * heads) for x in extra))


def _features(name: str, length: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if name == "linear-elu":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    if name == "linear-favor":
        x = x * x.shape[-1] ** -0.25
        projection = np.asarray(favor(x.shape[-1]).projection, np.float64)
        return np.exp(x @ projection.T - (x**2).sum(-1, keepdims=True) / 2)
    x = np.maximum(x, 0)
    if name == "linear-relu":
        return x + 1e-3
    angle = np.pi * positions[:, None] / (2 * length)
    return np.concatenate([x * np.cos(angle), x * np.sin(angle)], axis=-1)


def pairs(name: str, length: int, reach: int) -> dict[str, float] | None:
    """Return the shares of all pairs that a pattern costs; None for families.

    Returns:
        ``seen``: visible pairs; ``touched``: pairs of non-empty blocks of 64, the minimum of a
        kernel that skips blocks; ``computed``: pairs of the blocks that this library visits.
    """
    if name not in PATTERNS:
        return None
    mask = PATTERNS[name](length, reach, KEY)
    seen = float(mask.density(length, length))
    touched = np.asarray(mask.block_map(length, length, min(64, length)).kinds) > 0
    computed = seen  # by reshaping, "axial" computes only visible pairs
    if name != "axial":
        x = jax.ShapeDtypeStruct((1, length, 1, 64), np.float32)
        plan = aj.explain(x, x, x, mask=mask)
        every = (plan.visited or 0) + (plan.skipped or 0)
        computed = plan.visited / every if plan.visited is not None and every else 1.0
    return {"seen": seen, "touched": float(touched.mean()), "computed": computed}
