"""Records one call of attention for `capture`."""

import dataclasses
import fnmatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array
from attention_jax.diagnostics import maps
from attention_jax.diagnostics.application import Call
from attention_jax.diagnostics.collect import Collected
from attention_jax.diagnostics.record import AttentionRecord, Facts
from attention_jax.diagnostics.row_statistics import Rows, attend_with_rows
from attention_jax.kernels import dense
from attention_jax.kernels.request import Result
from attention_jax.plan import choose
from attention_jax.softmax import Stats


class Settings(NamedTuple):
    """The optional quantities of a record; hashable.

    Attributes:
        patterns: for each array of real tokens, the paths it belongs to.
        weights: whether to keep the weights.
        similarity: whether to compare heads.
        rollout: whether to keep the mean over heads.
    """

    patterns: tuple[str, ...]
    weights: bool
    similarity: bool
    rollout: bool


def record_call(settings: Settings, real: tuple[Any, ...], call: Call) -> tuple[Result, Any]:
    """The result of a call; its record, and the weight on real keys for each `real` that fits."""
    request, layout = call.request, call.request.layout
    facts = _facts(call)
    fitting = tuple(i for i, x in enumerate(real) if _fits(x, layout))
    if 0 in (*layout.batch, layout.N, layout.T, layout.S):
        result, fitting = call.run(request), ()
        zeros = jnp.zeros((*layout.batch, layout.N, layout.T), jnp.float32)
        rows = Rows(*[zeros] * len(Rows._fields))._replace(visible=zeros.astype(jnp.int32))
    else:
        result, rows = attend_with_rows(request, tuple(real[i] for i in fitting))
        if request.statistics:
            result = _with_statistics(result, rows)
    rows = jax.lax.stop_gradient(rows)
    similarity = weights = mean_map = None
    if settings.similarity and rows.entropy.size:
        similarity = maps.head_similarity(request, rows.lse, rows.visible)
    if settings.weights or settings.rollout:
        weights = dense.weights(request)
        mean_map = jnp.mean(weights, axis=-3) if settings.rollout else None
    arrays = request.query, request.key, request.value, result.out
    shares = {str(i): rows.real_share[..., k] for k, i in enumerate(fitting)}
    record = AttentionRecord(
        **{name: x for name, x in rows._asdict().items() if name not in ("real_share", "lse")},
        padding_share=None,
        out_norm=jnp.swapaxes(jnp.linalg.norm(result.out.astype(jnp.float32), axis=-1), -1, -2),
        out_weight=None,
        largest=jnp.stack([_largest(x) for x in arrays]),
        bad=jnp.stack([jnp.sum(~jnp.isfinite(x).all(-1)) for x in arrays]),
        counted=None,
        similarity=similarity,
        weights=weights if settings.weights else None,
        mean_map=mean_map,
        facts=facts,
    )
    return result, (record, shares)


def complete(
    settings: Settings, real: tuple[Any, ...], path: str, order: int, found: Collected
) -> AttentionRecord:
    """The record of a collected call whose path and enclosing transformations are now known."""
    record, shares = found.values
    # mapped axes are batch axes; quantities of the whole batch are reduced over them
    mapped = tuple(range(len(found.layers), len(found.layers) + found.mapped))
    axes = record.facts.batch_axes + found.mapped
    record = dataclasses.replace(
        record,
        largest=jnp.max(record.largest, axis=mapped),
        bad=jnp.sum(record.bad, axis=mapped),
        facts=record.facts._replace(order=order, batch_axes=axes),
    )
    for i, pattern in enumerate(settings.patterns):
        if str(i) in shares and fnmatch.fnmatchcase(path, pattern):
            share, counted = shares[str(i)], None
            if real[i].shape[-1] == share.shape[-1] and "cross" not in path:
                counted = jnp.asarray(real[i])[..., None, :]
                lead = (1,) * (share.ndim - counted.ndim)
                counted = jnp.broadcast_to(counted.reshape(*lead, *counted.shape), share.shape)
            padding = jnp.where(record.visible > 0, jnp.maximum(1 - share, 0), 0)
            return dataclasses.replace(record, padding_share=padding, counted=counted)
    return record


def _with_statistics(result: Result, rows: Rows) -> Result:
    stats = Stats(jnp.sum(rows.lse, axis=-1), rows.entropy, rows.max_logit)
    return result._replace(rows=stats, empty=rows.visible == 0)


def _fits(real: Any, layout: Any) -> bool:
    """Whether `real` broadcasts to `[*B, S]`, with its last axis S."""
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


def _facts(call: Call) -> Facts:
    request, layout = call.request, call.request.layout
    return Facts(
        kind=call.kind,
        order=0,
        score=repr(request.score),
        mask=None if request.mask is None else repr(request.mask),
        scale=request.score.scale_of_products(layout.H),
        depth=layout.H,
        dtype=np.dtype(request.query.dtype).name,
        implementation=choose(request, call.implementation).implementation,
        batch_axes=len(layout.batch),
        keys=layout.S,
    )
