"""Diagnoses a model from captures and training histories."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from attention_jax.diagnostics.capture import Capture
from attention_jax.diagnostics.conditions import has_learnt
from attention_jax.diagnostics.findings import Diagnosis, Finding
from attention_jax.diagnostics.rules import examine


def diagnose(
    *captures: Annotated[Any, Capture],
    history: Sequence[Mapping[str, Any]] | None = None,
    causal: str | Sequence[str] = ("*decoder*self_attention*",),
) -> Diagnosis:
    """Examines the attention of a model by rules, and reports symptom, evidence, cause and remedy.

    The rules find: uniform weights, weights collapsed on one key, a missing or a double scale,
    numbers that are not finite or close to overflow, dead and duplicate heads, queries without
    visible keys, attention to later positions or to padding, attention that is diluted on long
    sequences; and, in a history of training, entropy collapse (unless the loss, if there is one,
    ends below a quarter of its first value) and the first step with non-finite numbers.

    Args:
        *captures: results of `capture` for one model, commonly one; several, on inputs of
            different lengths, show whether attention is diluted on long sequences.
        history: the rows of a `monitor`, as from `read_history`.
        causal: patterns of paths whose attention must not see later positions.

    Returns:
        A `Diagnosis`, which iterates over findings and is false without any.

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
    findings = _attentions(captures, patterns)
    for found in captures:
        findings += examine("", found.bad_gradients or {}, "gradients")
    paths = dict.fromkeys(path for found in captures for path in found)
    for path in paths:
        findings += examine(path, [x[path] for x in captures if path in x], "lengths")
    rows = history or ()
    trained = dict.fromkeys(path for row in rows for path in row["attention"])
    findings += examine("", rows, "history")
    for path in () if has_learnt(rows) else trained:
        series = [(row["step"], row["attention"][path]) for row in rows if path in row["attention"]]
        findings += examine(path, series, "training")
    unique = {(finding.name, finding.where): finding for finding in reversed(findings)}
    kept = [f for f in findings if unique[f.name, f.where] is f]
    return Diagnosis(tuple(kept), len(paths | trained), _not_examined(captures))


def _attentions(captures: Sequence[Capture], causal: Sequence[str]) -> list[Finding]:
    findings: list[Finding] = []
    for found in captures:
        for path, record in found.items():
            masked = any(fnmatch.fnmatchcase(path, pattern) for pattern in causal)
            subjects = ("attention", "causal attention") if masked else ("attention",)
            new = examine(path, record, *subjects)
            known = any(finding.name == "not_finite" for finding in findings)
            if not known or all(finding.name != "not_finite" for finding in new):
                findings += new  # NaN propagates to all later attentions: it is reported once
    return findings


def _not_examined(captures: Sequence[Capture]) -> tuple[str, ...]:
    records = [record for found in captures for record in found.values()]
    notes = []
    if records and all(x.similarity is None for x in records if x.num_heads > 1):
        notes.append("whether heads have the same weights: capture(..., similarity=True)")
    if records and all(x.padding_share is None for x in records):
        notes.append("whether padding is attended to: capture(..., real=tokens != pad)")
    return tuple(notes)
