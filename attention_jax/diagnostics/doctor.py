"""From readings and histories to findings: symptom, evidence, cause, remedy."""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from attention_jax.diagnostics import rules
from attention_jax.diagnostics.capture import Capture
from attention_jax.diagnostics.findings import Diagnosis, Finding
from attention_jax.diagnostics.reading import Reading

_FOCUSED, _LOST = 0.6, 0.85  # of ln n: what a short row has, what a long one is left with
_SATURATED = 25.0  # growth of the largest logit; exp(-25) is below float32's resolution
_SHORT_HISTORY = 4
_LEARNT = 0.25  # of the first loss: who ends there looks at single keys for good reason


def diagnose(
    *captures: Annotated[Any, Capture],
    history: Sequence[Mapping[str, Any]] | None = None,
    causal: str | Sequence[str] = ("*decoder*self_attention*",),
) -> Diagnosis:
    """What ails a model, as a doctor would put it: symptom, evidence, likely cause, remedy.

    What it knows: weights too even, collapsed on one key, a scale that is missing or applied
    twice, numbers that are not finite or nearly so, heads that are dead or do the same, masks that
    hide everything, look ahead or let padding in, attention that thins out as sequences grow; and,
    from a history of training, entropy collapse (where the loss, if it is there, has not fallen to
    a quarter for good) and the step at which numbers stopped being finite.

    Args:
        *captures: what `capture` found: of one model, commonly one; two or more on inputs of
            different lengths tell whether attention thins out.
        history: the rows that a `monitor` wrote, as `read_history` gives them.
        causal: patterns of paths whose attention must not see later positions.

    Returns:
        A `Diagnosis`: findings to iterate over, false where there are none; prints well.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import MultiHeadAttention
        >>> layer = MultiHeadAttention(2, 128, score="dot", rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(0), (2, 16, 128))
        >>> found = aj.diagnostics.diagnose(aj.diagnostics.capture(layer, x))
        >>> found.names
        ('no_scale',)
        >>> print(found.findings[0].remedy)
        score="scaled_dot", or scores.scaled_dot() in place of dot()

    References:
        Vaswani et al. 2017, arXiv:1706.03762, §3.2.1 (scale).
        Zhai et al. 2023, arXiv:2303.06296 (entropy collapse).
        Chiang, Cholak 2022, "Overcoming a Theoretical Limitation of Self-Attention",
        arXiv:2202.12172 (long sequences).
    """
    for found in captures:
        if not isinstance(found, Capture):
            raise TypeError(f"diagnose takes captures, got {type(found).__name__}")
    if not captures and history is None:
        raise ValueError("diagnose needs a capture, or history=")
    patterns = (causal,) if isinstance(causal, str) else tuple(causal)
    findings: list[Finding] = []
    spoiled = False
    for found in captures:
        for path, reading in found.items():
            new = list(_examine(path, reading, patterns))
            if any(finding.name == "not_finite" for finding in new):
                # everything behind the first is spoiled with it
                new = [] if spoiled else [f for f in new if f.name == "not_finite"]
                spoiled = True
            findings += new
    findings += _gradients(captures)
    findings += _decay(captures)
    if history is not None:
        findings += _training(history)
    unique = {(finding.name, finding.where): finding for finding in reversed(findings)}
    kept = [f for f in findings if unique.get((f.name, f.where)) is f]
    watched = {path for row in history or () for path in row["attention"]}
    seen = watched | {path for found in captures for path in found}
    return Diagnosis(tuple(kept), len(seen), _left_out(captures))


def _examine(path: str, reading: Reading, causal: tuple[str, ...]) -> Iterator[Finding]:
    broken = list(rules.finiteness(path, reading))
    yield from broken
    if any(finding.name == "not_finite" for finding in broken):
        return
    # a mask that ought to hide and does not flattens weights: it is the finding, they follow
    must_not = any(fnmatch.fnmatchcase(path, pattern) for pattern in causal)
    yield from rules.masking(path, reading, causal=must_not)
    yield from rules.evenness(path, reading)
    yield from rules.sharpness(path, reading)
    yield from rules.heads(path, reading)


def _gradients(captures: Sequence[Capture]) -> Iterator[Finding]:
    for found in captures:
        bad = {name: int(n) for name, n in (found.bad_gradients or {}).items() if int(n)}
        if bad:
            name = next(iter(bad))
            yield Finding(
                "not_finite",
                name,
                "gradients that are not finite",
                f"{len(bad)} parameters, {sum(bad.values())} entries, {name} among them",
                "a loss or an activation that overflows, or a division by 0, in the backward pass",
                "optax.apply_if_finite around the optimiser; a larger dtype; jax_debug_nans",
                {"parameters": bad},
            )


def _decay(captures: Sequence[Capture]) -> Iterator[Finding]:
    """Rows that see much are flat where rows that see little are not."""
    for path in dict.fromkeys(path for found in captures for path in found):
        visible, relative = [], []
        for found in captures:
            if path in found and found[path].facts.kind != "MeanAttention":
                rows = found[path].rows(rules.FEW_KEYS)
                visible.append(np.broadcast_to(np.asarray(found[path].visible), rows.shape)[rows])
                relative.append(np.asarray(found[path].relative_entropy, np.float64)[rows])
        n, entropy = (np.concatenate(x) if x else np.zeros(0) for x in (visible, relative))
        if not n.size or n.max() < 4 * n.min():
            continue
        few, many = 2 * int(n.min()), int(n.max()) // 2
        short, long = entropy[n <= few].mean(), entropy[n >= many].mean()
        if short < _FOCUSED and long > _LOST:
            yield Finding(
                "long_sequence_decay",
                path,
                "attention that is focused on short inputs thins out on long ones",
                f"entropy {short:.2f} of ln n for rows that see up to {few} keys, {long:.2f} for "
                f"those that see {many} and more",
                "logits that do not grow with the length, while the softmax has more keys to share "
                "between",
                "score=scores.log_length(scores.scaled_dot(), 1.0), or a mask that bounds what is "
                "seen: masks.window(left, 0)",
                {"short": float(short), "long": float(long)},
            )


def _training(history: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    paths = dict.fromkeys(path for row in history for path in row["attention"])
    for row in history:
        broken = [
            (path, name)
            for path in paths
            for name, value in row["attention"].get(path, {}).items()
            if value is None or not np.isfinite(value) or (name == "bad" and value)
        ]
        if broken:
            path, name = broken[0]
            yield Finding(
                "not_finite",
                path,
                f"training broke at step {row['step']}",
                f"first at step {row['step']}: {', '.join(f'{n} of {p}' for p, n in broken[:4])}",
                "the steps before it: see how entropy, logits and gradients moved",
                "resume before it with a lower learning rate, optax.clip_by_global_norm(1.0), or "
                "normalize_qk=True",
                {"step": row["step"], "quantity": name},
            )
            break
    if not _has_learnt(history):
        for path in paths:
            yield from _collapse(path, [row for row in history if path in row["attention"]])


def _has_learnt(history: Sequence[Mapping[str, Any]]) -> bool:
    losses = [row["loss"] for row in history if row.get("loss") is not None]
    if len(losses) < _SHORT_HISTORY or not losses[0] > 0:
        return False
    last = float(np.mean(losses[-max(1, len(losses) // 10) :]))
    return bool(last <= _LEARNT * losses[0])


def _collapse(path: str, history: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    series = np.array(
        [[row["attention"][path][k] for k in ("entropy", "max_logit")] for row in history],
        np.float64,
    )
    finite = np.asarray(np.isfinite(series).all(axis=1))
    series, steps = series[finite], [row["step"] for row in history]
    steps = [step for step, ok in zip(steps, finite, strict=True) if ok]
    if len(series) < _SHORT_HISTORY:
        return
    some = max(1, len(series) // 10)
    (before, low), (after, high) = series[:some].mean(0), series[-some:].mean(0)
    if after < 0.1 * before and high - low > _SATURATED:
        when = steps[int(np.argmax(series[:, 0] < 0.1 * before))]
        yield Finding(
            "entropy_collapse",
            path,
            "entropy collapses while logits grow: attention freezes on single keys",
            f"entropy {before:.3g} at first, {after:.3g} at last, below a tenth from step {when}; "
            f"largest logit {low:.3g} at first, {high:.3g} at last",
            "query and key weights grow without bound, commonly by a learning rate too high",
            "normalize_qk=True, score=scores.soft_cap(scores.scaled_dot(), 30.0), warm-up, or "
            "diagnostics.entropy_regularizer in the loss",
            {"before": float(before), "after": float(after), "step": when},
        )


def _left_out(captures: Sequence[Capture]) -> tuple[str, ...]:
    readings = [reading for found in captures for reading in found.values()]
    notes = []
    if readings and all(x.similarity is None for x in readings if x.num_heads > 1):
        notes.append("whether heads do the same: capture(..., similarity=True)")
    if readings and all(x.padding_share is None for x in readings):
        notes.append("whether padding is attended: capture(..., real=tokens != pad)")
    return tuple(notes)
