"""The report of the study of stability."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.report.blocks import (
    Picture,
    Report,
    Results,
    Section,
    Table,
    claims,
    diverged,
    joined,
    known,
    listed,
    mean,
    mean_sd,
    number,
    observations,
    runs,
    seeds,
)
from experiments.report.figures import curves, picture

_BASE = "1/√d"  # what clipping, norm and cap are added to
_BETTER = 1.1  # a loss lower by this factor counts as lower


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]
    how = (
        f"Associative recall of {settings['pairs']} pairs with one attention layer of depth "
        f"{settings['depth']}, {settings['steps']:,} steps of Adam with warm-up, batches of "
        f"{settings['batch_size']}, the same problems for all. No gradient is clipped but in "
        f"“clipping” (norm {settings['clip']:g}); “QK norm” is normalize_qk=True; “soft cap” "
        f"bounds logits at {settings['cap']:g}. Each of the three is 1/√d with that one change. "
        "Learnt is a held-out loss of half of what it was before training, or less."
    )
    rates = results["learning_rates"]
    series = {
        form: [
            [(rate, values[seed]) for rate, values in zip(rates, row["valid_loss"], strict=True)]
            for seed in range(settings["seeds"])
        ]
        for form, row in results["summary"].items()
    }
    words = "Held-out loss by learning rate"
    sweep = picture(
        folder, "sweep", curves, [("", series)], x="learning rate", y="held-out loss, nats",
        markers=True, log_x=True, log_y=True, alt=f"{words}; the numbers are in the table.",
        caption=f"{words}.",
    )  # fmt: skip
    norms: Callable[[Any], Any] = lambda m: list(enumerate(m["gradient_norm"], 1))  # noqa: E731
    steps = [
        _steps(results, folder, "entropy", "Entropy of the attention / ln n"),
        _steps(results, folder, "max_logit", "Largest logit", log=True),
        _steps(results, folder, "gradient_norm", "Gradient norm", norms, log=True),
    ]
    return Report(
        title="How high the learning rate may be",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged(
            (f"{m['form']} at learning rate {m['learning_rate']:g}, seed {m['seed']},",
             m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            Section("Over the learning rates", [how], [sweep, _table(results)]),
            Section("Over the steps", [], steps),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )  # fmt: skip


def _best(results: Results, form: str) -> tuple[float, float] | None:
    """Return the lowest mean loss of a form and the learning rate that it has it at."""
    rates, losses = results["learning_rates"], results["summary"][form]["valid_loss"]
    ranked = [(m, r) for r, v in zip(rates, losses, strict=True) if (m := mean(v)) is not None]
    return min(ranked, default=None)


def highest(results: Results, form: str) -> float | None:
    """Return the highest learning rate at which all seeds of a form have learnt."""
    learnt = zip(results["learning_rates"], results["summary"][form]["learnt"], strict=True)
    return max((r for r, count in learnt if count == results["settings"]["seeds"]), default=None)


def _answer(results: Results) -> list[str | None]:
    forms, rates = list(results["summary"]), results["learning_rates"]
    reached = {form: highest(results, form) for form in forms}
    able = listed(reached, "g")
    unable = joined(form for form in forms if reached[form] is None)
    best = {form: b for form in forms if (b := _best(results, form)) is not None}
    ranked = sorted(best.items(), key=lambda item: item[1])
    lowest = joined(f"{form} {loss:.3g} (at {rate:g})" for form, (loss, rate) in ranked)
    at = rates.index(max(rates))
    ends = []
    for form in forms:
        entropy, logit = (mean(results["summary"][form][n][at]) for n in ("entropy", "max_logit"))
        if entropy is not None and logit is not None:
            ends.append(f"{form} {entropy:.2f} of ln n with logits up to {logit:.3g}")
    return [
        f"The highest learning rate of those tried at which it learns: {able}." if able else None,
        f"At no learning rate it has learnt in {results['settings']['steps']:,} steps: {unable}."
        if unable
        else None,
        f"Lowest held-out loss, best first: {lowest}." if lowest else None,
        f"Entropy at the end of training at learning rate {rates[at]:g}: {joined(ends)}."
        if ends
        else None,
    ]


def _table(results: Results) -> Table:
    rows = []
    for form, summary in results["summary"].items():
        for at, rate in enumerate(results["learning_rates"]):
            own = [m for m in results["models"] if (m["form"], m["learning_rate"]) == (form, rate)]
            stopped = [str(m["diverged_at"]) for m in own if m["diverged_at"] is not None]
            largest = [max(known(m["gradient_norm"]), default=None) for m in own]
            rows.append(
                [
                    f"{form}, {rate:g}",
                    mean_sd(summary["valid_loss"][at], 3),
                    mean_sd(summary["accuracy"][at], percent=True),
                    mean_sd(summary["entropy"][at], 2),
                    mean_sd(summary["max_logit"][at]),
                    mean_sd(largest, 2),
                    joined(stopped) or "–",
                    joined(dict.fromkeys(name for m in own for name in m["findings"])) or "none",
                ]
            )
    columns = [
        "form, learning rate", "held-out loss", "right answers", "entropy / ln n",
        "largest logit", "largest gradient norm", "diverged at step", "the doctor finds",
    ]  # fmt: skip
    return Table(f"After training ({seeds(results)})", columns, rows)


def _steps(
    results: Results,
    folder: Path,
    name: str,
    words: str,
    curve: Callable[[Any], Any] | None = None,
    *,
    log: bool = False,
) -> Picture:
    """Draw one quantity over the steps: a panel for each learning rate."""
    panels = []
    for rate in results["learning_rates"]:
        own = [m for m in results["models"] if m["learning_rate"] == rate]
        series = runs(own, "form", curve or (lambda m: observations(m, name)))
        panels.append((f"learning rate {rate:g}", series))
    return picture(
        folder, name, curves, panels, x="step", y=words, log_y=log,
        alt=f"{words} over the steps, by learning rate.",
        caption=f"{words} over the steps, mean and range over the seeds, by learning rate.",
    )  # fmt: skip


def _changed(results: Results, form: str) -> str:
    """Return what a form changes beside 1/√d, in words; "" where either was not measured."""
    if not {form, _BASE} <= results["summary"].keys():
        return ""
    own, other = _best(results, form), _best(results, _BASE)
    if own is None or other is None:
        return ""
    ours, base = own[0], other[0]
    verdict = (
        "a lower loss" if ours * _BETTER < base
        else "a higher loss" if ours > base * _BETTER
        else "the same loss"
    )  # fmt: skip
    reach = [number(highest(results, f), "g").replace("–", "none") for f in (form, _BASE)]
    return (
        f"{form} has {verdict} at its best: {ours:.3g} against {base:.3g} with {_BASE}; highest "
        f"learning rate that learns: {reach[0]} against {reach[1]}"
    )


def _claims(results: Results) -> Table:
    models = results["models"]
    collapsed = sum("entropy_collapse" in m["findings"] for m in models)
    broken = sum(
        "entropy_collapse" in m["findings"] and m["diverged_at"] is not None for m in models
    )
    return claims(
        [
            (
                "Zhai et al. 2023, arXiv 2303.06296",
                "Entropy collapse precedes divergence.",
                f"entropy collapses in {collapsed} of {len(models)} trainings; {broken} of these "
                f"diverge, and {sum(m['diverged_at'] is not None for m in models)} of all",
            ),
            (
                "Henry et al. 2020, arXiv 2010.04245 (second-hand)",
                "Normalised queries and keys with a learned scale: +0.93 BLEU on small data.",
                _changed(results, "QK norm"),
            ),
            (
                "Vaswani et al. 2017, arXiv 1706.03762, §3.2.1",
                "Without the scale the softmax has extremely small gradients.",
                _changed(results, "no scale"),
            ),
            ("Clipping", "–", _changed(results, "clipping")),
            ("A soft cap on the logits", "–", _changed(results, "soft cap")),
        ]
    )
