"""The report of the study of stability."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.report import figures
from experiments.report.blocks import (
    COMPARE_THE_SHAPE,
    Picture,
    Report,
    Row,
    Section,
    Table,
    diverged,
    joined,
    known,
    mean,
    mean_sd,
)

Results = Mapping[str, Any]
_BASE = "1/√d"  # what clipping, norm and cap are added to
_BETTER = 1.1  # a loss lower by this factor counts as lower


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    settings = results["settings"]
    how = (
        f"Associative recall of {settings['pairs']} pairs with one attention layer of depth "
        f"{settings['depth']}, {settings['steps']:,} steps of Adam with warm-up, batches of "
        f"{settings['batch_size']}, the same problems for all. No gradient is clipped but in "
        f"“clipping” (norm {settings['clip']:g}); “QK norm” is normalize_qk=True; “soft cap” "
        f"bounds logits at {settings['cap']:g}. Each of the three is 1/√d with that one change. "
        "Learnt is a held-out loss of half of what it was before training, or less."
    )
    return Report(
        title="How high the learning rate may be",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged(
            (
                f"{m['form']} at learning rate {m['learning_rate']:g}, seed {m['seed']},",
                m["diverged_at"],
            )
            for m in results["models"]
        ),
        sections=[
            Section("Over the learning rates", [how], [_sweep(results, folder), _table(results)]),
            Section(
                "Over the steps",
                [],
                [
                    _steps(results, folder, "entropy", "Entropy of the attention / ln n"),
                    _steps(results, folder, "max_logit", "Largest logit", log=True),
                    _steps(results, folder, "gradient_norm", "Gradient norm", log=True),
                ],
            ),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _best(results: Results, form: str) -> tuple[float, float] | None:
    """Return the lowest mean loss of a form and the learning rate that it has it at."""
    rates, losses = results["learning_rates"], results["summary"][form]["valid_loss"]
    ranked = [(m, r) for r, v in zip(rates, losses, strict=True) if (m := mean(v)) is not None]
    return min(ranked, default=None)


def highest(results: Results, form: str) -> float | None:
    """Return the highest learning rate at which all seeds of a form have learnt."""
    seeds = results["settings"]["seeds"]
    learnt = zip(results["learning_rates"], results["summary"][form]["learnt"], strict=True)
    return max((rate for rate, count in learnt if count == seeds), default=None)


def _answer(results: Results) -> list[str]:
    said = []
    forms = list(results["summary"])
    reached = {form: highest(results, form) for form in forms}
    able = {form: rate for form, rate in reached.items() if rate is not None}
    if able:
        listed = joined([f"{form} {rate:g}" for form, rate in able.items()])
        said.append(f"The highest learning rate of those tried at which it learns: {listed}.")
    if unable := [form for form in forms if form not in able]:
        steps = results["settings"]["steps"]
        said.append(f"At no learning rate it has learnt in {steps:,} steps: {joined(unable)}.")
    best = {form: b for form in forms if (b := _best(results, form)) is not None}
    if best:
        ranked = sorted(best.items(), key=lambda item: item[1])
        listed = joined([f"{form} {loss:.3g} (at {rate:g})" for form, (loss, rate) in ranked])
        said.append(f"Lowest held-out loss, best first: {listed}.")
    at = max(range(len(results["learning_rates"])), key=results["learning_rates"].__getitem__)
    ends = []
    for form in forms:
        summary = results["summary"][form]
        entropy, logit = mean(summary["entropy"][at]), mean(summary["max_logit"][at])
        if entropy is not None and logit is not None:
            ends.append(f"{form} {entropy:.2f} of ln n with logits up to {logit:.3g}")
    if ends:
        rate = results["learning_rates"][at]
        said.append(f"Entropy at the end of training at learning rate {rate:g}: {joined(ends)}.")
    return said


def _sweep(results: Results, folder: Path) -> Picture:
    series = {
        form: [
            [
                (rate, values[seed])
                for rate, values in zip(
                    results["learning_rates"], summary["valid_loss"], strict=True
                )
            ]
            for seed in range(results["settings"]["seeds"])
        ]
        for form, summary in results["summary"].items()
    }
    words = "Held-out loss by learning rate"
    figures.curves(
        folder / "figures/sweep.png", [("", series)], x="learning rate",
        y="held-out loss, nats", markers=True, log_x=True, log_y=True,
    )  # fmt: skip
    return Picture("figures/sweep.png", f"{words}; the numbers are in the table.", f"{words}.")


def _table(results: Results) -> Table:
    rows = []
    for form, summary in results["summary"].items():
        for at, rate in enumerate(results["learning_rates"]):
            own = [m for m in results["models"] if m["form"] == form and m["learning_rate"] == rate]
            stopped = [str(m["diverged_at"]) for m in own if m["diverged_at"] is not None]
            findings = dict.fromkeys(name for m in own for name in m["findings"])
            rows.append(
                Row(
                    [
                        f"{form}, {rate:g}",
                        mean_sd(summary["valid_loss"][at], 3),
                        mean_sd(summary["accuracy"][at], percent=True),
                        mean_sd(summary["entropy"][at], 2),
                        mean_sd(summary["max_logit"][at]),
                        mean_sd([_largest(m) for m in own], 2),
                        joined(stopped) or "–",
                        joined(list(findings)) or "none",
                    ]
                )
            )
    count = results["settings"]["seeds"]
    seeds = "quick: one seed" if count == 1 else f"mean ± standard deviation, {count} seeds"
    return Table(
        f"After training ({seeds})",
        [
            "form, learning rate", "held-out loss", "right answers", "entropy / ln n",
            "largest logit", "largest gradient norm", "diverged at step", "the doctor finds",
        ],
        rows,
    )  # fmt: skip


def _largest(model: Mapping[str, Any]) -> float | None:
    return max(known(model["gradient_norm"]), default=None)


def _steps(results: Results, folder: Path, name: str, words: str, *, log: bool = False) -> Picture:
    """Draw one quantity over the steps: a panel for each learning rate."""
    curve: Callable[[Mapping[str, Any]], Any] = (
        (lambda m: list(enumerate(m["gradient_norm"], 1)))
        if name == "gradient_norm"
        else (lambda m: [(row["step"], row[name]) for row in m["observed"]])
    )
    panels = []
    for rate in results["learning_rates"]:
        own = [m for m in results["models"] if m["learning_rate"] == rate]
        series = {form: [curve(m) for m in own if m["form"] == form] for form in results["summary"]}
        panels.append((f"learning rate {rate:g}", series))
    file = f"figures/{name}.png"
    figures.curves(folder / file, panels, x="step", y=words, log_y=log)
    return Picture(
        file, f"{words} over the steps, by learning rate.",
        f"{words} over the steps, mean and range over the seeds, by learning rate.",
    )  # fmt: skip


def _changed(results: Results, form: str) -> str:
    """Return what a form changes beside 1/√d, in words."""
    if not {form, _BASE} <= results["summary"].keys():
        return "–"
    ours, base = _best(results, form), _best(results, _BASE)
    if ours is None or base is None:
        return "–"
    verdict = (
        "a lower loss" if ours[0] * _BETTER < base[0]
        else "a higher loss" if ours[0] > base[0] * _BETTER
        else "the same loss"
    )  # fmt: skip
    reach = [
        "none" if (rate := highest(results, f)) is None else f"{rate:g}" for f in (form, _BASE)
    ]
    return (
        f"{form} has {verdict} at its best: {ours[0]:.3g} against {base[0]:.3g} with {_BASE}; "
        f"highest learning rate that learns: {reach[0]} against {reach[1]}"
    )


def _collapse(results: Results) -> str:
    count = sum("entropy_collapse" in m["findings"] for m in results["models"])
    broken = sum(m["diverged_at"] is not None for m in results["models"])
    total = len(results["models"])
    return f"entropy collapses in {count} of {total} trainings; {broken} of them diverge"


def _claims(results: Results) -> Table:
    rows = [
        (
            "Zhai et al. 2023, arXiv 2303.06296",
            "Entropy collapse precedes divergence.",
            _collapse(results),
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
    return Table(
        f"Published: {COMPARE_THE_SHAPE}", ["paper", "claim", "ours"],
        [Row(row, published=row[1] != "–") for row in rows], prose=True,
    )  # fmt: skip
