"""The conditions of the rules of `diagnose`: the numbers of a finding, or None.

Names with an underscore are for the texts of the rule only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attention_jax.diagnostics.record import AttentionRecord

FEW_KEYS = 4  # rows with fewer visible keys are left out
EVEN = 0.995  # of ln n; at initialisation scaled scores have about 0.87, additive ones 0.96
FLAT = 0.97  # of ln n, if the scale is known to be too small
SHARP = 0.9  # largest weight
UNSCALED = 0.5  # of ln n, if the scale is known to be too large; H = 64 without scale: 0.15
ONE_KEY = 0.02  # standard deviation of the mean key over rows, as a share of S
DEAD = 1e-3  # of the median head's output norm
SAME = 0.98  # cosine between two heads
ALIKE = 0.01  # distance between the statistics of two heads, in standard deviations
SATURATED = 25.0  # range or growth of logits; exp(-25) is below float32's resolution
FROZEN = 1e-3  # norm of the softmax Jacobian
LEAK = 1e-6  # of a row's weight
NEAR_END = 0.25  # of the largest number of a dtype
FOCUSED, DILUTED = 0.6, 0.85  # of ln n, in rows with few keys and with many
SHORT_HISTORY = 4  # rows
LEARNT = 0.25  # of the first loss; a model that ends below it may well be sharp
COLLAPSED = 0.1  # of the first entropy

Numbers = dict[str, Any] | None
Condition = Callable[[Any], Numbers]
Rows = Sequence[Mapping[str, Any]]  # as from `history`


def not_finite(record: AttentionRecord) -> Numbers:
    """Queries or outputs with NaN or infinity."""
    bad, dtype = _by_array(record.bad), record.facts.dtype
    if not (bad["query"] or bad["output"]):
        return None
    cause = "it arises here: query, key and value are finite"
    if bad["query"] or bad["key"] or bad["value"]:
        cause = "not-finite queries, keys or values: check the projections and the layers before"
    counted = ", ".join(f"{n} {name}" for name, n in bad.items() if n)
    texts = {"_counted": counted, "_cause": cause, "_remedy": _wider(dtype)}
    return {"bad": bad, "dtype": dtype, **texts}


def near_overflow(record: AttentionRecord) -> Numbers:
    """An array close to the largest number of its dtype."""
    dtype = record.facts.dtype
    end = {"float16": 65504.0, "float64": 1.8e308}.get(dtype, 3.4e38)
    name, largest = max(_by_array(record.largest).items(), key=lambda item: item[1])
    texts = {"_name": name, "_end": end, "_remedy": _wider(dtype)}
    return {"largest": largest, "dtype": dtype, **texts} if largest > NEAR_END * end else None


def _by_array(x: Any) -> dict[str, Any]:
    return dict(zip(("query", "key", "value", "output"), np.asarray(x).tolist(), strict=True))


def _wider(dtype: str) -> str:
    if dtype == "float16":
        return "dtype=jnp.bfloat16, which has float32's range, or dtype=jnp.float32"
    return 'norm="pre", optax.clip_by_global_norm(1.0), a lower learning rate'


def empty_rows(record: AttentionRecord) -> Numbers:
    """Rows without visible keys that padding does not explain."""
    visible = np.asarray(record.visible) > 0
    real = record.rows(0)
    empty = ~visible & real
    earlier = np.maximum.accumulate(visible, -1)
    later = np.flip(np.maximum.accumulate(np.flip(visible, -1), -1), -1)
    front = empty & ~earlier & later
    if record.counted is None and not front.any((-2, -1)).all():
        front[...] = False  # some examples start with empty rows and others do not: padding
    # empty rows at the end of an example are padding too
    empty &= (earlier & later) | front | ~visible.any(-1, keepdims=True)
    count, total = int(empty.sum()), int(real.sum())
    return {"rows": count, "share": count / total, "_total": total} if count else None


def leak(name: str) -> Condition:
    """The mean of a share of the weights that must be 0; None if it was not recorded."""

    def condition(record: AttentionRecord) -> Numbers:
        if getattr(record, name) is None:
            return None
        rows = np.asarray(getattr(record, name), np.float64)[record.rows()]
        share = float(rows.mean()) if rows.size else 0.0
        return {name: share} if share > LEAK else None

    return condition


def sharpness(test: Callable[[dict[str, Any]], bool]) -> Condition:
    """A test of means over rows with several keys, and of the scale; NaN if there are none."""

    def condition(record: AttentionRecord) -> Numbers:
        facts, root = record.facts, math.sqrt(record.facts.depth)
        largest = np.asarray(record.largest, np.float64).tolist()
        numbers = {"scale": facts.scale, "query": largest[0], "key": largest[1]}
        for name in ("relative_entropy", "largest_weight", "logit_range", "jacobian_norm"):
            heads = _heads(record, name)
            heads = heads[~np.isnan(heads)]
            numbers[name] = float(heads.mean()) if heads.size else math.nan
            numbers[f"_least_{name}"] = float(heads.min()) if heads.size else math.nan
        if facts.kind == "MeanAttention":  # its weights are uniform by definition
            numbers["_least_relative_entropy"] = math.nan
        relative = math.nan if facts.scale is None else facts.scale * root
        numbers |= {"_root": root, "_inverse": 1 / root, "_relative_scale": relative}
        return numbers if test(numbers) else None

    return condition


def _heads(record: AttentionRecord, name: str) -> np.ndarray:
    return record.per_head(name, least_visible=FEW_KEYS)


def one_key(record: AttentionRecord) -> Numbers:
    """Heads in which every query attends to the same key."""
    counts = record.rows(FEW_KEYS)
    enough = counts.sum(-1) >= 2
    keys = np.where(counts, np.asarray(record.mean_key, np.float64), np.nan)
    deviation = np.where(enough, np.nanstd(np.where(enough[..., None], keys, 0), axis=-1), 0)
    axes = tuple(range(enough.ndim - 1))
    moved = deviation.sum(axes) / np.maximum(enough.sum(axes), 1)
    largest = _heads(record, "largest_weight")
    heads = np.flatnonzero((largest > SHARP) & (moved < ONE_KEY) & enough.any(axes))
    if not heads.size:
        return None
    means = (x[heads].mean() for x in (largest, moved, _heads(record, "first_share")))
    texts = dict(zip(("_largest", "_moved", "_first"), means, strict=True), _heads=_named(heads))
    return {"heads": heads.tolist(), "largest_weight": largest[heads].tolist(), **texts}


def _named(heads: np.ndarray) -> str:
    return f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"


def dead(record: AttentionRecord) -> Numbers:
    """Heads whose output is close to 0."""
    norms = record.per_head("out_norm")
    if record.out_weight is not None:
        norms = norms * np.asarray(record.out_weight, np.float64)
    median = float(np.median(norms))
    heads = np.flatnonzero(norms <= DEAD * median)
    if norms.size < 2 or not heads.size or not 0 < norms.max() < np.inf:
        return None
    texts = {"_heads": _named(heads), "_median": median, "_norm": norms[heads].max()}
    return {"heads": heads.tolist(), "out_norm": norms[heads].tolist(), **texts}


def duplicates(record: AttentionRecord) -> Numbers:
    """Pairs of heads with the same weights: by cosines if there are any, else by statistics."""
    if record.similarity is None:
        distance = _distances(record)
        alike, name, worst = distance < ALIKE, "rows_apart", np.max
        evidence = "their row statistics differ by at most {:.2g} standard deviations"
    else:
        distance = np.asarray(record.similarity, np.float64)
        distance = distance.reshape(-1, *distance.shape[-2:]).mean(0)
        alike, name, worst = distance > SAME, "similarity", np.min
        evidence = "cosine of their centred weights {:.4f} or more"
    uniform = _heads(record, "relative_entropy") >= EVEN
    alike = np.triu(alike, 1) & ~uniform & ~uniform[:, None]
    pairs = [(int(m), int(n)) for m, n in zip(*np.nonzero(alike), strict=True)]
    if not pairs:
        return None
    value = float(worst(distance[alike]))
    shown = ", ".join(f"{m} and {n}" for m, n in pairs)
    left = record.num_heads - len({n for _, n in pairs})
    texts = {"_pairs": shown, "_evidence": evidence.format(value), "_left": left}
    return {"pairs": pairs, name: value, **texts}


def _distances(record: AttentionRecord) -> np.ndarray:
    """The largest distance between the statistics of two heads' rows, `[N, N]`."""

    def by_head(x: Any) -> np.ndarray:
        return np.moveaxis(np.asarray(x), -2, 0).reshape(record.num_heads, -1)

    counts = by_head(record.rows(FEW_KEYS)).all(0)
    distance = np.full((record.num_heads,) * 2, 0.0 if counts.any() else np.inf)
    for name in ("entropy", "largest_weight", "first_share", "self_share", "mean_key"):
        x = by_head(getattr(record, name)).astype(np.float64)[:, counts]
        if x.size:
            between = np.sqrt(np.mean((x[:, None] - x[None]) ** 2, axis=-1))
            distance = np.maximum(distance, between / max(float(x.std()), 1e-6))
    return distance


def bad_gradients(counts: Mapping[str, Any]) -> Numbers:
    """Gradients with NaN or infinity, from the number of such entries by parameter."""
    bad = {name: int(n) for name, n in counts.items() if int(n)}
    texts = {"_n": len(bad), "_sum": sum(bad.values()), "_where": next(iter(bad), "")}
    return {"parameters": bad, **texts} if bad else None


def diluted(records: Sequence[AttentionRecord]) -> Numbers:
    """Rows with many keys are almost uniform while rows with few keys are not."""
    records = [x for x in records if x.facts.kind != "MeanAttention"]
    n, entropy = (
        np.concatenate([np.asarray(getattr(x, name))[x.rows(FEW_KEYS)] for x in records] or [[]])
        for name in ("visible", "relative_entropy")
    )
    if not n.size or n.max() < 4 * n.min():
        return None
    few, many = 2 * int(n.min()), int(n.max()) // 2
    short, long = (float(x.mean(dtype=np.float64)) for x in (entropy[n <= few], entropy[n >= many]))
    if not (short < FOCUSED and long > DILUTED):
        return None
    return {"short": short, "long": long, "_few": few, "_many": many}


def broken(rows: Rows) -> Numbers:
    """The first row with a number that is not finite."""
    for row in rows:
        found = [
            (path, name)
            for path, fields in row["attention"].items()
            for name, value in fields.items()
            if value is None or not np.isfinite(value) or (name == "bad" and value)
        ]
        if found:
            shown = ", ".join(f"{name} of {path}" for path, name in found[:4])
            (where, quantity), *_ = found
            return {"step": row["step"], "quantity": quantity, "_shown": shown, "_where": where}
    return None


def has_learnt(rows: Rows) -> bool:
    """Whether the loss, if there is one, ends far below its first value."""
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    if len(losses) < SHORT_HISTORY or not losses[0] > 0:
        return False
    return bool(np.mean(losses[-max(1, len(losses) // 10) :]) <= LEARNT * losses[0])


def collapse(rows: Sequence[tuple[int, Mapping[str, Any]]]) -> Numbers:
    """The entropy falls while logits grow, from one attention's fields by step."""
    x = np.array([(step, y["entropy"], y["max_logit"]) for step, y in rows], np.float64)
    x = x[np.isfinite(x).all(axis=1)]
    if len(x) < SHORT_HISTORY:
        return None
    some = max(1, len(x) // 10)
    (_, before, low), (_, after, high) = x[:some].mean(0).tolist(), x[-some:].mean(0).tolist()
    if not (after < COLLAPSED * before and high - low > SATURATED):
        return None
    step = int(x[np.argmax(x[:, 1] < COLLAPSED * before), 0])
    return {"before": before, "after": after, "step": step, "_low": low, "_high": high}
