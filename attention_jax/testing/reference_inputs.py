"""Checks the arguments of the reference and converts them to float64 with one batch axis.

NumPy only; shares no code with the library under test.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from attention_jax.testing.reference_scores import SCORES, Numbers, RowScore


class Inputs(NamedTuple):
    """The inputs in float64, with all leading axes flattened into B."""

    batch: tuple[int, ...]
    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, K, Hk]
    value: np.ndarray  # [B, S, K, V]
    mask: np.ndarray  # [B, N, T, S] bool
    bias: np.ndarray  # [B, N, T, S]
    keep: np.ndarray  # [B, N, T, S], 0 or 1 / (1 - rate)
    scores: np.ndarray | None  # [B, N, T, S]
    score: RowScore
    params: list[dict[str, np.ndarray]]  # one per head

    @property
    def heads_per_group(self) -> int:
        """N // K, the number of query heads per key head."""
        return self.query.shape[2] // self.key.shape[2]


def read_inputs(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    score: str | RowScore,
    params: Mapping[str, Numbers] | None,
    scale: Numbers | None,
    scores: Numbers | None,
    mask: Numbers | None,
    bias: Numbers | None,
    dropout_rate: float | int,
    dropout_mask: Numbers | None,
) -> Inputs:
    """Checks the arguments and brings them into one shape."""
    q, k, v = (_float64(x) for x in (query, key, value))
    for name, x, letters in (
        ("query", q, "*B T N H"),
        ("key", k, "*B S K H"),
        ("value", v, "*B S K V"),
    ):
        if x.ndim < 3:
            raise ValueError(f"{name} must be [{letters}], got shape {x.shape}")
    batch, (t_len, n_heads, _), (s_len, k_heads, _) = q.shape[:-3], q.shape[-3:], k.shape[-3:]
    if k.shape[:-3] != batch or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            "query [*B T N H], key [*B S K H] and value [*B S K V] must agree in *B, S and K, "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if k_heads == 0 or n_heads % k_heads:
        raise ValueError(f"query heads {n_heads} must be a multiple of key heads {k_heads} (N, K)")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate {dropout_rate} must lie in [0, 1)")
    if scores is not None and (score != "scaled_dot" or params or scale is not None):
        raise ValueError("scores replaces the score: score, params and scale must not be given too")
    row_score = _row_score(score)

    pairs = (*batch, n_heads, t_len, s_len)
    size = int(np.prod(batch))
    keep = _boolean("dropout_mask", dropout_mask, pairs, size) / (1.0 - dropout_rate)
    return Inputs(
        batch=batch,
        query=q.reshape(size, *q.shape[-3:]),
        key=k.reshape(size, *k.shape[-3:]),
        value=v.reshape(size, *v.shape[-3:]),
        mask=_boolean("mask", mask, pairs, size),
        bias=_pairs("bias", 0.0 if bias is None else _float64(bias), pairs, size),
        keep=keep,
        scores=None if scores is None else _pairs("scores", _float64(scores), pairs, size),
        score=row_score,
        params=_split_heads(score, named_params(params, scale), n_heads),
    )


def _float64(x: Numbers) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _row_score(score: str | RowScore) -> RowScore:
    if isinstance(score, RowScore):
        return score
    if score not in SCORES:
        raise ValueError(f"score {score!r} must be a RowScore or one of {sorted(SCORES)}")
    return SCORES[score].make()


def _boolean(name: str, mask: Numbers | None, pairs: tuple[int, ...], size: int) -> np.ndarray:
    array = np.asarray(True if mask is None else mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name} must be boolean, got {array.dtype}; use bias for numbers to add")
    return _pairs(name, array, pairs, size)


def _pairs(name: str, x: Numbers, pairs: tuple[int, ...], size: int) -> np.ndarray:
    """Broadcasts to [*B, N, T, S] and flattens the batch axes."""
    try:
        return np.broadcast_to(x, pairs).reshape(size, *pairs[-3:])
    except ValueError:
        raise ValueError(
            f"{name} of shape {np.shape(x)} does not broadcast to [*B N T S] = {pairs}"
        ) from None


def read_cotangent(name: str, x: Numbers | None, shape: tuple[int, ...], size: int) -> np.ndarray:
    """A cotangent in float64 with one batch axis; None is zero."""
    array = np.zeros(shape) if x is None else _float64(x)
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
    return array.reshape(size, *shape[len(shape) - (3 if name == "d_out" else 2) :])


_RANKS = {
    name: len(axes.split())
    for score in SCORES.values()
    for name, axes in (*score.parameters.items(), ("tau", ""))
}


def named_params(
    params: Mapping[str, Numbers] | None, scale: Numbers | None
) -> dict[str, np.ndarray]:
    """The parameters of the score by name, with `scale`."""
    named = {name: _float64(x) for name, x in (params or {}).items()}
    if scale is not None:
        named["scale"] = _float64(scale)
    return named


def _split_heads(
    score: str | RowScore, named: dict[str, np.ndarray], n_heads: int
) -> list[dict[str, np.ndarray]]:
    """The parameters of each head: row n if there is a head axis, else the shared parameter."""
    if isinstance(score, str):
        known = set(SCORES[score].parameters)
        missing = [] if SCORES[score].optional else sorted(known - set(named))
        unknown = sorted(set(named) - known)
        if missing or unknown:
            raise ValueError(f"score {score!r}: params {missing} missing, {unknown} unknown")
    for name, x in named.items():
        if name in _RANKS and x.ndim == _RANKS[name] + 1 and x.shape[0] != n_heads:
            raise ValueError(
                f"{name} of shape {x.shape} must have one entry per query head, N={n_heads}"
            )
    return [
        {
            name: np.asarray(x[n]) if x.ndim > _RANKS.get(name, x.ndim) else x
            for name, x in named.items()
        }
        for n in range(n_heads)
    ]
