"""Sentences of the compare study's report."""

import statistics

from experiments.report import blocks as report

_NOISE = 0.1  # by which the medians of two timings of one thing may differ on a shared machine


def span(bucket: report.Results) -> str:
    """Return a range of lengths as it stands in a table."""
    low, high = bucket["low"], bucket["high"]
    return str(low) if low >= high else f"{low}–{high}"


def costs_in_words(results: report.Results) -> str | None:
    """Return the step times as ratios, those within the noise of 1 apart from the others."""
    own = results["summary"].get("scaled_dot", {}).get("step_milliseconds", [])
    apart: dict[str, float | None] = {}
    alike = []
    for score, row in results["summary"].items():
        times = zip(row["step_milliseconds"], own, strict=False)
        ratios = report.known(t / b for t, b in times if t and b)
        if score == "scaled_dot" or not ratios:
            continue
        noise = 2 * statistics.stdev(ratios) if len(ratios) > 1 else _NOISE
        if abs(statistics.fmean(ratios) - 1) > noise:
            apart[score] = statistics.fmean(ratios)
        else:
            alike.append(report.label(score))
    if not apart and not alike:
        return None
    said = f"A training step takes {report.number(report.mean(own), '.0f')} ms with the scaled dot"
    if apart:
        said += f"; as a multiple of that: {report.listed(apart, '.2f', words=report.label)}"
    if alike:
        limit = (
            f"{_NOISE:.0%} of it, which one seed cannot tell from noise"
            if results["settings"]["seeds"] == 1
            else "twice the spread over seeds of it"
        )
        said += f"; within {limit}: {report.joined(alike)}"
    return f"{said}."


def model_in_words(settings: report.Results) -> str:
    """Return what there is in all of the models, in words."""
    if settings["model"] == "gru":
        near = " near a predicted position (local-p)" if settings["location"] == "local-p" else ""
        return (
            "Encoder and decoder are recurrent (GRU). Additive attention comes before the "
            f"decoder's step, as Bahdanau's, every other one after it, as Luong's{near}."
        )
    if settings["vary"] == "cross":
        return (
            "Self-attention is the scaled dot product in all of them: only the attention to the "
            "source differs."
        )
    return (
        "Self-attention has the model's own score too (the scaled dot product where there is no "
        "attention to the source)."
    )


def lengths_in_words(data: report.Results) -> str:
    """Return what the lengths count, and whether tested ones go beyond the trained ones."""
    trained, tested = data["longest_trained"], data["lengths"]["test"][1]
    said = f"{report.capital(data['length_unit'])} of the source sentence, marks included. "
    if tested > trained:
        return f"{said}Training had none longer than {trained}: what lies beyond is extrapolation."
    return f"{said}No test sentence is longer than the {trained} of training."


def data_in_words(data: report.Results) -> str:
    """Return how many sentences of which lengths were used, and how many were left out."""
    used = {
        split: f"{data['sentences'][split]:,} of {span({'low': low, 'high': high})} "
        + data["length_unit"]
        for split, (low, high) in data["lengths"].items()
    }
    left = report.joined(
        f"{n:,} of {split}" for split, n in data["left_out_as_too_long"].items() if n
    )
    return (
        f"Sentences used: {used['train']} to train on, {used['valid']} to observe, {used['test']} "
        f"to test. Tokens are {data['unit']}s: {data['vocabulary']['source']:,} source and "
        f"{data['vocabulary']['target']:,} target ones, four special ones included."
        + (f" Left out before that as too long: {left}." if left else "")
    )
