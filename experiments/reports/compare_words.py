"""Sentences of the compare study's report, each computed from the numbers."""

import statistics
from collections.abc import Mapping
from typing import Any

from experiments.report.blocks import joined
from experiments.report.blocks import known as measured
from experiments.report.figures import label

Results = Mapping[str, Any]
_NOISE = 0.1  # by which the medians of two timings of one thing may differ on a shared machine


def costs_in_words(results: Results) -> str | None:
    """Return the step times as ratios, those within the noise of 1 apart from the others."""
    own = results["summary"].get("scaled_dot", {}).get("step_milliseconds", [])
    known = [t for t in measured(own) if t]
    if not known:
        return None
    apart, alike = [], []
    for score, row in results["summary"].items():
        times = zip(row["step_milliseconds"], own, strict=True)
        ratios = measured(t / b for t, b in times if t and b)
        if score == "scaled_dot" or not ratios:
            continue
        noise = 2 * statistics.stdev(ratios) if len(ratios) > 1 else _NOISE
        ratio = statistics.fmean(ratios)
        if abs(ratio - 1) > noise:
            apart.append(f"{label(score)} {ratio:.2f}")
        else:
            alike.append(label(score))
    if not apart + alike:
        return None
    said = f"A training step takes {statistics.fmean(known):.0f} ms with the scaled dot"
    if apart:
        said += f"; as a multiple of that: {joined(apart)}"
    if alike:
        limit = (
            f"{_NOISE:.0%} of it, which one seed cannot tell from noise"
            if results["settings"]["seeds"] == 1
            else "twice the spread over seeds of it"
        )
        said += f"; within {limit}: {joined(alike)}"
    return f"{said}."


def lengths_in_words(data: Mapping[str, Any]) -> str:
    """Return what the lengths count, and whether tested ones go beyond the trained ones."""
    trained, tested = data["longest_trained"], data["lengths"]["test"][1]
    said = f"{data['length_unit'].capitalize()} of the source sentence, marks included. "
    if tested > trained:
        return said + (
            f"Training saw none longer than {trained}: what lies beyond asks a model for lengths "
            "it never met."
        )
    return said + f"No test sentence is longer than the {trained} that training saw."


def data_in_words(data: Mapping[str, Any]) -> str:
    """Return how many sentences of which lengths were used, and how many were left out."""
    sizes, vocabulary = data["sentences"], data["vocabulary"]
    used = {
        split: f"{sizes[split]:,} of {span({'low': low, 'high': high})} {data['length_unit']}"
        for split, (low, high) in data["lengths"].items()
    }
    text = (
        f"Sentences used: {used['train']} to train on, {used['valid']} to watch, {used['test']} to "
        f"test. Tokens are {data['unit']}s: {vocabulary['source']:,} source and "
        f"{vocabulary['target']:,} target ones, four special ones included."
    )
    left = [f"{n:,} of {split}" for split, n in data["left_out_as_too_long"].items() if n]
    return text + (f" Left out before that as too long: {joined(left)}." if left else "")


def span(bucket: Mapping[str, Any]) -> str:
    """Return a range of lengths as it stands in a table."""
    low, high = bucket["low"], bucket["high"]
    return str(low) if low >= high else f"{low}–{high}"
