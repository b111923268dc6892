"""One call of attention, looked at: its result, and its reading once it is known whose it is."""

import dataclasses
import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF
from attention_jax.diagnostics import maps
from attention_jax.diagnostics.harvest import Found
from attention_jax.diagnostics.measure import Rows, run
from attention_jax.diagnostics.reading import Facts, Reading
from attention_jax.kernels import dense
from attention_jax.kernels.request import Request, Result
from attention_jax.plan import choose
from attention_jax.scores.modifiers import Clip, SoftCap
from attention_jax.scores.score import Sum
from attention_jax.scores.similarity import Dot, ScaledDot
from attention_jax.softmax import Stats

ROWS = (
    "entropy",
    "relative_entropy",
    "largest_weight",
    "first_share",
    "self_share",
    "ahead_share",
    "mean_key",
    "visible",
    "max_logit",
    "logit_range",
    "jacobian_norm",
)


class Wanted(NamedTuple):
    """What is asked of every call; hashable.

    Attributes:
        patterns: of the attentions that each array of real tokens is for.
        weights: whether weights are kept.
        similarity: whether heads are compared.
        rollout: whether the mean map is kept.
    """

    patterns: tuple[str, ...]
    weights: bool
    similarity: bool
    rollout: bool


def look(
    wanted: Wanted,
    real: tuple[Any, ...],
    request: Request,
    again: Any,
    implementation: Any,
    kind: str,
) -> tuple[Result, Any]:
    """One call of attention: its result and its reading, with a share for each `real` that fits."""
    layout = request.layout
    facts = _facts(request, implementation, kind)
    if 0 in (*layout.batch, layout.N, layout.T, layout.S):
        result = again(request)
        zeros = jnp.zeros((*layout.batch, layout.N, layout.T), jnp.float32)
        rows = Rows(*([zeros] * 13))._replace(
            real_share=zeros[..., None][..., :0], visible=zeros.astype(jnp.int32)
        )
        fitting: tuple[int, ...] = ()
    else:
        fitting = tuple(i for i, x in enumerate(real) if _fits(x, layout))
        result, rows = run(request, tuple(real[i] for i in fitting))
        if request.statistics:  # the model itself wants them
            result = result._replace(stats=_stats(rows))
    rows = jax.lax.stop_gradient(rows)
    similarity = weights = mean_map = None
    if wanted.similarity and rows.lse.ndim > rows.entropy.ndim:
        similarity = maps.head_similarity(request, rows.lse, rows.visible)
    if wanted.weights or wanted.rollout:
        weights = dense.weights(request)
        mean_map = jnp.mean(weights, axis=-3) if wanted.rollout else None
    arrays = request.query, request.key, request.value, result.out
    reading = Reading(
        **{name: getattr(rows, name) for name in ROWS},
        padding_share=None,
        out_norm=jnp.swapaxes(jnp.linalg.norm(result.out.astype(jnp.float32), axis=-1), -1, -2),
        out_weight=None,
        largest=jnp.stack([_largest(x) for x in arrays]),
        bad=jnp.stack([jnp.sum(~jnp.isfinite(x).all(-1)) for x in arrays]),
        counted=None,
        similarity=similarity,
        weights=weights if wanted.weights else None,
        mean_map=mean_map,
        facts=facts,
    )
    return result, (reading, {str(i): rows.real_share[..., k] for k, i in enumerate(fitting)})


def _stats(rows: Rows) -> Stats:
    empty = rows.visible == 0
    lse, top = jnp.sum(rows.lse, axis=-1), rows.max_logit
    return Stats(jnp.where(empty, NEG_INF, lse), rows.entropy, jnp.where(empty, NEG_INF, top))


def settle(wanted: Wanted, real: tuple[Any, ...], path: str, order: int, found: Found) -> Reading:
    """A reading once its path is known, and with it which tokens are real."""
    reading, shares = found.kept
    # mapped axes are batch axes; what is told of the whole batch, is told of all of it
    mapped = tuple(range(len(found.layers), len(found.layers) + found.mapped))
    axes = reading.facts.batch_axes + found.mapped
    reading = dataclasses.replace(
        reading,
        largest=jnp.max(reading.largest, axis=mapped),
        bad=jnp.sum(reading.bad, axis=mapped),
        facts=reading.facts._replace(order=order, batch_axes=axes),
    )
    for i, pattern in enumerate(wanted.patterns):
        if str(i) in shares and fnmatch.fnmatchcase(path, pattern):
            share = shares[str(i)]
            seen = reading.visible > 0
            padding = jnp.where(seen, jnp.maximum(1 - share, 0), 0)
            counted = None
            if real[i].shape[-1] == share.shape[-1] and "cross" not in path:
                counted = jnp.asarray(real[i])[..., None, :]
                lead = (1,) * (share.ndim - counted.ndim)
                counted = jnp.broadcast_to(counted.reshape(*lead, *counted.shape), share.shape)
            return dataclasses.replace(reading, padding_share=padding, counted=counted)
    return reading


def _fits(real: Any, layout: Any) -> bool:
    batch = real.shape[:-1]
    tail = layout.batch[len(layout.batch) - len(batch) :]
    return (
        real.shape[-1] == layout.S
        and len(batch) <= len(layout.batch)
        and all(a in (1, b) for a, b in zip(batch, tail, strict=True))
    )


def _largest(x: Any) -> Array:
    x = jnp.asarray(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)


def _facts(request: Request, implementation: Any, kind: str) -> Facts:
    score: Any = request.score
    inner, depth = score, request.layout.H
    while isinstance(inner, Sum | SoftCap | Clip):  # whose scale is that of what is inside
        inner = inner.score
    scale = None
    if isinstance(inner, Dot):
        scale = 1.0
    elif isinstance(inner, ScaledDot) and (factor := inner.static_scale(depth)) is not None:
        scale = float(factor)
    name = choose(request, implementation).implementation
    mask = None if request.mask is None else repr(request.mask)
    dtype = np.dtype(request.query.dtype).name
    axes = len(request.layout.batch)
    return Facts(kind, 0, repr(score), mask, scale, depth, dtype, name, axes, request.layout.S)
