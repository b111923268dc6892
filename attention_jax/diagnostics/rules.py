"""The troubles that show in one reading: each rule looks at one attention at a time."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from attention_jax.diagnostics.findings import Finding
from attention_jax.diagnostics.reading import Reading

# Rows that see fewer keys say little: two keys can hardly be told apart evenly or sharply.
FEW_KEYS = 4
EVEN = 0.995  # of ln n; untrained scaled scores have about 0.87, additive ones about 0.96
FLAT = 0.97  # of ln n, where the scale is known to be too small
SHARP = 0.9  # largest weight
UNSCALED = 0.5  # of ln n, where the scale is known to be wrong; 64 deep and unscaled: 0.15
ONE_PLACE = 0.02  # deviation of where rows look, in lengths of the sequence
DEAD = 1e-3  # of the median head's output
SAME = 0.98  # cosine of two heads' maps
ALIKE = 0.01  # difference of two heads' rows, over their deviation
SATURATED = 25.0  # logits apart; exp(-25) is below float32's resolution
FROZEN = 1e-3  # of the softmax's Jacobian
LEAK = 1e-6  # of a row's weight
FULL = 0.25  # of the largest number of a dtype


def evenness(path: str, reading: Reading) -> Iterator[Finding]:
    """Weights so even that the attention is a mean."""
    if reading.facts.kind == "MeanAttention":
        return
    relative = reading.per_head("relative_entropy", least_visible=FEW_KEYS)
    if np.isnan(relative).all() or np.nanmin(relative) < FLAT:
        return
    even = bool(np.nanmin(relative) >= EVEN)
    facts, found = reading.facts, float(np.nanmean(relative))
    spread = float(np.nanmean(reading.per_head("logit_range", least_visible=FEW_KEYS)))
    query, key = (float(x) for x in np.asarray(reading.largest)[:2])
    numbers = {"relative_entropy": found, "logit_range": spread, "scale": facts.scale}
    symptom = "every query weighs all it sees alike: the attention is a mean"
    evidence = f"entropy {found:.4f} of ln n in all heads, logits {spread:.3g} apart in a row"
    root = math.sqrt(facts.depth)
    if facts.scale is not None and facts.scale * root < 0.5:
        yield Finding(
            "double_scale",
            path,
            symptom,
            f"{evidence}; scale {facts.scale:.4g}, 1/√H is {1 / root:.4g}",
            f"the scores are divided by √H = {root:.3g} once too often"
            if abs(facts.scale * facts.depth - 1) < 0.1
            else "the score's scale is far below 1/√H",
            'leave the scale to the score: score="scaled_dot", or scores.scaled_dot()',
            numbers,
        )
    elif facts.scale is not None and facts.depth >= 16 and key < 2 * query * root < 4 * key:
        yield Finding(
            "double_scale",
            path,
            symptom,
            f"{evidence}; queries up to {query:.3g} and keys up to {key:.3g}, √H is {root:.3g}",
            "queries are smaller than keys by about √H: they seem to be scaled before the score "
            "scales again",
            'scale once: pass queries as they are, or score="dot" with queries scaled before',
            {**numbers, "query": query, "key": key},
        )
    elif even:
        hot = "temperature(" in facts.score
        yield Finding(
            "too_even",
            path,
            symptom,
            evidence,
            f"the temperature in {facts.score} is too high"
            if hot
            else "queries and keys are too small to tell keys apart (initialisation, weight decay)",
            "lower tau= of scores.temperature"
            if hot
            else "a learned scale: score=attention_jax.nnx.cosine(10.0), or a larger kernel_init=",
            numbers,
        )


def sharpness(path: str, reading: Reading) -> Iterator[Finding]:
    """Weights that saturate, by a missing scale, or that fall on one key whoever asks."""
    facts, root = reading.facts, math.sqrt(reading.facts.depth)
    relative = reading.per_head("relative_entropy", least_visible=FEW_KEYS)
    largest = reading.per_head("largest_weight", least_visible=FEW_KEYS)
    if np.isnan(relative).all():
        return
    spread = float(np.nanmean(reading.per_head("logit_range", least_visible=FEW_KEYS)))
    jacobian = float(np.nanmean(reading.per_head("jacobian_norm", least_visible=FEW_KEYS)))
    mean, top = float(np.nanmean(relative)), float(np.nanmean(largest))
    if facts.scale is not None and facts.scale * root >= 2 and mean < UNSCALED:
        yield Finding(
            "no_scale",
            path,
            "the softmax saturates: weights near 0 and 1 leave little gradient",
            f"entropy {mean:.3f} of ln n, largest weight {top:.3f}, logits {spread:.3g} apart, "
            f"Jacobian {jacobian:.3g}; scale {facts.scale:.4g}, 1/√H is {1 / root:.4g}",
            f"dot products of depth H = {facts.depth} are not divided by √H = {root:.3g}",
            'score="scaled_dot", or scores.scaled_dot() in place of ' + facts.score,
            {"relative_entropy": mean, "largest_weight": top, "jacobian_norm": jacobian},
        )
        return
    if np.nanmin(largest) > SHARP and spread > SATURATED and jacobian < FROZEN:
        yield Finding(
            "collapsed",
            path,
            "each query's weights have collapsed on one key: no gradient passes the softmax",
            f"largest weight {top:.4f}, entropy {mean:.2g} of ln n, logits {spread:.3g} apart, "
            f"Jacobian {jacobian:.2g}",
            "queries and keys are too large: a learning rate too high, an initialisation too wide"
            if facts.scale is not None and facts.scale * root < 2
            else "scores without a scale, or with one too large",
            "normalize_qk=True, or score=scores.soft_cap(scores.scaled_dot(), 50.0); a smaller "
            "kernel_init= or learning rate",
            {"largest_weight": top, "logit_range": spread, "jacobian_norm": jacobian},
        )
        return
    counts = reading.rows(FEW_KEYS)
    place = np.where(counts, np.asarray(reading.mean_key, np.float64), np.nan)
    enough = counts.sum(-1) >= 2
    if not enough.any():
        return
    deviation = np.nanstd(np.where(enough[..., None], place, 0), axis=-1)
    axes = tuple(i for i in range(deviation.ndim) if i != deviation.ndim - 1)
    moved = np.where(enough, deviation, 0).sum(axes) / np.maximum(enough.sum(axes), 1)
    heads = np.flatnonzero((largest > SHARP) & (moved < ONE_PLACE) & enough.any(axes))
    if not heads.size:
        return
    first = reading.per_head("first_share", least_visible=FEW_KEYS)[heads]
    sink = bool((first > SHARP).all())
    yield Finding(
        "collapsed",
        path,
        f"all queries look at one and the same key, in {_heads(heads)}",
        f"largest weight {largest[heads].mean():.3f}, where rows look differs by "
        f"{moved[heads].mean():.2g} of the length, share on the first key {first.mean():.3f}",
        "a sink on the first token: heads with nothing to say rest there"
        if sink
        else "one key outgrew all others: keys or logits without bound",
        "normalize_qk=True, or score=scores.soft_cap(scores.scaled_dot(), 50.0); a lower learning "
        "rate or a longer warm-up",
        {"heads": heads.tolist(), "largest_weight": largest[heads].tolist()},
    )


def finiteness(path: str, reading: Reading) -> Iterator[Finding]:
    """What is not finite, or nearly not."""
    names = ("query", "key", "value", "output")
    bad, largest = np.asarray(reading.bad), np.asarray(reading.largest, np.float64)
    dtype = reading.facts.dtype
    numbers = {"bad": dict(zip(names, bad.tolist(), strict=True)), "dtype": dtype}
    counted = ", ".join(f"{n} {name}" for name, n in zip(names, bad, strict=True) if n)
    if bad[0] or bad[3]:
        here = not bad[:3].any()
        yield Finding(
            "not_finite",
            path,
            "NaN or infinity",
            f"positions that are not finite: {counted}; dtype {dtype}",
            f"it arises here: query, key and value are finite, up to {largest[:3].max():.3g}"
            if here
            else "it comes in with queries, keys or values: look at the parameters of this layer's "
            "projections, and at what runs before it",
            _wider(dtype),
            numbers,
        )
        return
    most = _largest_number(dtype)
    if largest.max() > FULL * most:
        which = names[int(largest.argmax())]
        yield Finding(
            "near_overflow",
            path,
            f"the {which} is close to the largest number of {dtype}",
            f"{which} up to {largest.max():.4g}, {dtype} ends at {most:.4g}",
            "activations grow without bound: no norm in front, or a learning rate too high",
            _wider(dtype),
            {**numbers, "largest": float(largest.max())},
        )


def _wider(dtype: str) -> str:
    if dtype == "float16":
        return "dtype=jnp.bfloat16, which has float32's range, or dtype=jnp.float32"
    return 'norm="pre", optax.clip_by_global_norm(1.0), a lower learning rate'


def _largest_number(dtype: str) -> float:
    return {"float16": 65504.0, "float64": 1.8e308}.get(dtype, 3.4e38)


def heads(path: str, reading: Reading) -> Iterator[Finding]:
    """Heads that say nothing, and heads that do what another does."""
    norms = reading.per_head("out_norm")
    if reading.out_weight is not None:
        norms = norms * np.asarray(reading.out_weight, np.float64)
    if np.isfinite(norms).all() and norms.size > 1:
        middle = float(np.median(norms))
        dead = np.flatnonzero(norms <= DEAD * middle)
        if dead.size and norms.max() > 0:
            yield Finding(
                "dead_heads",
                path,
                f"{_heads(dead)} put out next to nothing",
                f"length of the output {norms[dead].max():.3g}, of the median head {middle:.3g}",
                "values or the head's part of the output projection died out: weight decay, or an "
                "initialisation of 0",
                "nnx.prune_heads(model, {"
                + f"{path!r}: {dead.tolist()}"
                + "}), or begin them anew",
                {"heads": dead.tolist(), "out_norm": norms[dead].tolist()},
            )
    if norms.size > 1:
        yield from _duplicates(path, reading)


def _duplicates(path: str, reading: Reading) -> Iterator[Finding]:
    """By the maps' cosines where they were asked for, else by rows that agree in all they say."""
    if reading.similarity is None:
        apart = _rows_apart(reading)
        alike, quantity, most = apart < ALIKE, "rows_apart", np.max
        evidence = "row by row they agree in entropy, largest weight and place, to {:.2g}"
    else:
        similar = np.asarray(reading.similarity, np.float64)
        apart = similar.reshape(-1, *similar.shape[-2:]).mean(0)
        alike, evidence = (
            apart > SAME,
            "cosine of the maps {:.4f} or more, an even spread taken away",
        )
        quantity, most = "similarity", np.min
    even = reading.per_head("relative_entropy", least_visible=FEW_KEYS) >= EVEN
    pairs = [
        (int(m), int(n))
        for m, n in zip(*np.nonzero(np.triu(alike, 1)), strict=True)
        if not (even[m] or even[n])
    ]
    if pairs:
        shown = ", ".join(f"{m} and {n}" for m, n in pairs)
        worst = float(most([apart[m, n] for m, n in pairs]))
        copies = len({n for _, n in pairs})
        yield Finding(
            "duplicate_heads",
            path,
            f"heads {shown} have one and the same map",
            evidence.format(worst),
            "heads that began alike, or more heads than the task needs",
            f"nnx.merge_similar_heads, or fewer heads: num_heads={reading.num_heads - copies}",
            {"pairs": pairs, quantity: worst},
        )


def _rows_apart(reading: Reading) -> np.ndarray:
    """How far two heads' rows differ in what is said of them, over what rows differ, `[N, N]`."""
    rows = np.moveaxis(reading.rows(FEW_KEYS), -2, 0)
    rows = rows.reshape(len(rows), -1).all(0)  # those that count in every head
    apart = np.zeros((reading.num_heads,) * 2)
    if not rows.any():
        return apart + np.inf
    for name in ("entropy", "largest_weight", "first_share", "self_share", "mean_key"):
        x = np.moveaxis(np.asarray(getattr(reading, name), np.float64), -2, 0)
        x = x.reshape(len(x), -1)[:, rows]
        between = np.sqrt(np.mean((x[:, None] - x[None]) ** 2, axis=-1))
        apart = np.maximum(apart, between / max(float(x.std()), 1e-6))
    return apart


def masking(path: str, reading: Reading, *, causal: bool) -> Iterator[Finding]:
    """Masks that hide all, let the future in or let padding in."""
    visible = np.asarray(reading.visible)
    counts = np.ones_like(visible, bool) if reading.counted is None else np.asarray(reading.counted)
    empty = (visible == 0) & counts
    earlier = np.maximum.accumulate(visible > 0, -1)
    later = np.flip(np.maximum.accumulate(np.flip(visible > 0, -1), -1), -1)
    front = empty & ~earlier & later
    if reading.counted is None and not front.any((-2, -1)).all():
        front[...] = False  # some examples have empty rows in front, and some none: padding
    # empty rows at the end alone are padding
    lost = empty & ((earlier & later) | front | ~visible.any(-1, keepdims=True))
    facts = reading.facts
    if lost.any():
        yield Finding(
            "mask_hides_all",
            path,
            "queries that may see nothing: their output is 0",
            f"{int(lost.sum())} of {int(counts.sum())} rows; mask {facts.mask}",
            "a mask with True and False swapped, or two masks that leave nothing together",
            "mask=: True where a query may look; compare mask.to_array(T, S) with what you meant",
            {"rows": int(lost.sum()), "share": float(lost.sum() / max(counts.sum(), 1))},
        )
    if causal:
        ahead = float(np.asarray(reading.ahead_share, np.float64)[reading.rows()].mean())
        if ahead > LEAK:
            yield Finding(
                "look_ahead",
                path,
                "queries see keys at later positions: training copies what it should predict",
                f"{ahead:.3f} of the weight lies ahead; mask {facts.mask}",
                "no causal mask" if facts.mask is None else "a mask without a causal part",
                "mask=masks.causal(), joined to others with &",
                {"ahead_share": ahead},
            )
    if reading.padding_share is not None:
        rows = np.asarray(reading.padding_share, np.float64)[reading.rows()]
        if rows.size and rows.mean() > LEAK:
            yield Finding(
                "padding_attended",
                path,
                "padding is looked at",
                f"{rows.mean():.3f} of the weight lies on padding, up to {rows.max():.3f}; "
                f"mask {facts.mask}",
                "no padding mask, or one for another axis",
                "mask=masks.padding(key_lengths), or source_mask=tokens != pad of Transformer",
                {"padding_share": float(rows.mean())},
            )


def _heads(indices: Any) -> str:
    listed = ", ".join(map(str, indices))
    return f"head {listed}" if len(indices) == 1 else f"heads {listed}"
