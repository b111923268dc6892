"""The range of stable learning rates of attention, and remedies that widen it."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, StudyOptions
from experiments.report import blocks as report

# The settings of each form; the last three are the second with one change each.
FORMS = ("no scale", "1/√d", "clipping", "QK norm", "soft cap")


@dataclasses.dataclass(frozen=True)
class Stability(StudyOptions):
    """At which learning rates does attention still learn, and what widens the range?

    Associative recall with one attention layer, over a sweep of learning rates: with no scale, with
    1/√d, and with 1/√d and one remedy more: gradients clipped, queries and keys normalised, logits
    soft-capped. Held-out loss by learning rate; entropy, largest logit and gradient norm over the
    steps; what the doctor finds in each.

    Beside it: Zhai et al. 2023 (arXiv 2303.06296), entropy collapse precedes divergence; Henry et
    al. 2020 (2010.04245), normalised queries and keys; Vaswani et al. 2017 (1706.03762) §3.2.1.

    Command: python -m experiments stability. Takes 4 minutes on two cores; quick 50 s, full 15
    minutes.
    Expected: at a high learning rate logits grow and entropy falls to 0 before anything is learnt;
    a norm or a cap bounds the logits; without a scale the softmax is saturated from the start.
    """

    learning_rates: tuple[float, ...] = FROM_PRESET
    """The highest learning rate of each training, after the warm-up."""
    forms: tuple[str, ...] = FORMS
    """Of "no scale", "1/√d", "clipping", "QK norm", "soft cap"."""
    steps: int = FROM_PRESET
    """Training steps of each model."""
    batch_size: int = 32
    """Problems in a batch."""
    depth: int = 64
    """Depth of the one head."""
    pairs: int = 32
    """Pairs to remember (S)."""
    queries: int = 16
    """Questions on each list (T)."""
    clip: float = 1.0
    """The largest gradient norm, where it is clipped."""
    cap: float = 30.0
    """The bound of the logits, where they are soft-capped."""

    study: ClassVar[str] = "stability"
    choices: ClassVar = {"forms": FORMS}
    each_once: ClassVar = ("learning_rates",)
    intervals: ClassVar = {
        "learning_rates": "(0, inf)", "clip": "(0, inf)", "cap": "(0, inf)", "pairs": "[2, 64]",
    }  # fmt: skip
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"learning_rates": (0.003, 0.03, 0.3), "steps": 100, "seeds": 1},
        "default": {"learning_rates": (0.001, 0.01, 0.1, 1.0), "steps": 250, "seeds": 3},
        "full": {"learning_rates": (0.0003, 0.001, 0.01, 0.1, 1.0), "steps": 1500, "seeds": 3},
    }

    def run(self) -> Path:
        """Train each form at each learning rate and write the report."""
        rates, seeds = self.learning_rates, range(self.seeds)
        models = {
            f"form{FORMS.index(form)}-rate{rate:g}-seed{seed}": (form, rate, seed)
            for form, rate, seed in itertools.product(self.forms, rates, seeds)
        }
        with RunFolder.open(self, len(models) * self.steps) as run:
            return run.conclude(_results(self, run.all_trained(models, _train)), build_report)


_WORDS = 64
_WIDTH = 64
_LOOKS = 15


def _train(
    options: Stability, run: RunFolder, key: str, form: str, rate: float, seed: int
) -> dict[str, Any]:
    from experiments.core.optim import Recipe
    from experiments.models import recall

    task = recall.task(
        f"{form}, learning rate {rate:g}, seed {seed}",
        _model(options, form, seed),
        seed=seed, batch_size=options.batch_size, pairs=options.pairs, queries=options.queries,
        words=_WORDS,
    )  # fmt: skip
    clip = options.clip if form == "clipping" else math.inf
    recipe = Recipe.short(options.steps, rate, observations=_LOOKS, clip=clip)
    history = run.train(key, task, recipe).history
    return {"form": form, "learning_rate": rate, "seed": seed, **history.record()}


def _model(options: Stability, form: str, seed: int) -> Any:
    """Return a fresh model of one form."""
    from flax import nnx

    from attention_jax import scores
    from experiments.models.recall import Recall

    scale = 1.0 if form == "no scale" else options.depth**-0.5
    settings: dict[str, Any] = {}
    if form == "QK norm":
        settings["normalize_qk"] = True
    if form == "soft cap":
        settings["score"] = scores.soft_cap(scores.scaled_dot(scale), options.cap)
    return Recall(_WORDS, _WIDTH, options.depth, scale, rngs=nnx.Rngs(seed), **settings)


def _results(options: Stability, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the study's part of results.json."""
    from experiments import curve_checks

    found = curve_checks.trained_models({"study": options.study, "models": done})
    models = [
        {**cell, "findings": list(curve_checks.examine(model).names)}
        for cell, model in zip(done, found, strict=True)
    ]
    summary = {}
    for form in options.forms:
        rows = [
            [m for m in models if m["form"] == form and m["learning_rate"] == rate]
            for rate in options.learning_rates or ()
        ]
        summary[form] = {
            **{
                name: [[m["observed"][-1][name] for m in row] for row in rows]
                for name in ("valid_loss", "accuracy", "entropy", "max_logit")
            },
            "learnt": [sum(map(_learnt, row)) for row in rows],
        }
    return {
        "learning_rates": list(options.learning_rates or ()),
        "summary": summary,
        "models": models,
    }


def _learnt(model: Mapping[str, Any]) -> bool:
    """Return whether training succeeded: held-out loss at most half of the initial one."""
    first, last = (model["observed"][i]["valid_loss"] for i in (0, -1))
    if model["diverged_at"] is not None or first is None or last is None:
        return False
    return last <= first / 2


_BASE = "1/√d"  # the form that clipping, norm and cap extend
_CURVES = {
    "entropy": "Entropy of the attention / ln n",
    "max_logit": "Largest logit",
    "gradient_norm": "Gradient norm",
}
_BETTER = 1.1  # a loss lower by this factor counts as lower


def build_report(results: report.Results, folder: Path) -> report.Report:
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
    sweep = report.picture(
        folder, "sweep", "curves", [("", series)], x="learning rate", y="held-out loss, nats",
        markers=True, log_x=True, log_y=True, alt=f"{words}; the numbers are in the table.",
        caption=f"{words}.",
    )  # fmt: skip
    steps = [
        report.training(
            folder, results["models"], name, words, line=lambda m: m["form"],
            panel=lambda m: f"learning rate {m['learning_rate']:g}", log=name != "entropy",
        )
        for name, words in _CURVES.items()
    ]  # fmt: skip
    return report.Report(
        title="How high the learning rate may be",
        answer=_answer(results),
        warnings=report.diverged(
            (f"{m['form']} at learning rate {m['learning_rate']:g}, seed {m['seed']},",
             m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            report.Section("Over the learning rates", [how], [sweep, _table(results)]),
            report.Section("Over the steps", [], steps),
            report.Section("What the papers say", [], [_claims(results)]),
        ],
    )  # fmt: skip


def _best(results: report.Results, form: str) -> tuple[float, float] | None:
    """Return the lowest mean loss of a form and the learning rate that it has it at."""
    rates, losses = results["learning_rates"], results["summary"][form]["valid_loss"]
    ranked = [
        (m, r) for r, v in zip(rates, losses, strict=True) if (m := report.mean(v)) is not None
    ]
    return min(ranked, default=None)


def highest(results: report.Results, form: str) -> float | None:
    """Return the highest learning rate at which all seeds of a form have learnt."""
    learnt = zip(results["learning_rates"], results["summary"][form]["learnt"], strict=True)
    return max((r for r, count in learnt if count == results["settings"]["seeds"]), default=None)


def _answer(results: report.Results) -> list[str | None]:
    forms, rates = list(results["summary"]), results["learning_rates"]
    reached = {form: highest(results, form) for form in forms}
    able = report.listed(reached, "g")
    unable = report.joined(form for form in forms if reached[form] is None)
    best = {form: b for form in forms if (b := _best(results, form)) is not None}
    ranked = sorted(best.items(), key=lambda item: item[1])
    lowest = report.joined(f"{form} {loss:.3g} (at {rate:g})" for form, (loss, rate) in ranked)
    at = rates.index(max(rates))
    ends = []
    for form in forms:
        entropy, logit = (
            report.mean(results["summary"][form][n][at]) for n in ("entropy", "max_logit")
        )
        if entropy is not None and logit is not None:
            ends.append(f"{form} {entropy:.2f} of ln n with logits up to {logit:.3g}")
    return [
        f"The highest learning rate of those tried at which it learns: {able}." if able else None,
        f"At no learning rate it has learnt in {results['settings']['steps']:,} steps: {unable}."
        if unable
        else None,
        f"Lowest held-out loss, best first: {lowest}." if lowest else None,
        f"Entropy at the end of training at learning rate {rates[at]:g}: {report.joined(ends)}."
        if ends
        else None,
    ]


def _table(results: report.Results) -> report.Table:
    rows = []
    for form, summary in results["summary"].items():
        for at, rate in enumerate(results["learning_rates"]):
            own = [m for m in results["models"] if (m["form"], m["learning_rate"]) == (form, rate)]
            stopped = [str(m["diverged_at"]) for m in own if m["diverged_at"] is not None]
            findings = dict.fromkeys(name for m in own for name in m["findings"])
            norms = [report.known(norm for _, norm in m["gradient_norm"]) for m in own]
            largest = [max(values, default=None) for values in norms]
            rows.append(
                [
                    f"{form}, {rate:g}",
                    report.mean_sd(summary["valid_loss"][at], 3),
                    report.mean_sd(summary["accuracy"][at], percent=True),
                    report.mean_sd(summary["entropy"][at], 2),
                    report.mean_sd(summary["max_logit"][at]),
                    report.mean_sd(largest, 2),
                    report.joined(stopped) or "–",
                    report.joined(findings) or "none",
                ]
            )
    columns = [
        "form, learning rate", "held-out loss", "right answers", "entropy / ln n",
        "largest logit", "largest gradient norm", "diverged at step", "the doctor finds",
    ]  # fmt: skip
    return report.Table(f"After training ({report.seeds(results)})", columns, rows)


def _changed(results: report.Results, form: str) -> str:
    """Return the difference of a form from 1/√d, in words; "" if either was not measured."""
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
    reach = [report.number(highest(results, f), "g").replace("–", "none") for f in (form, _BASE)]
    return (
        f"{form} has {verdict} at its best: {ours:.3g} against {base:.3g} with {_BASE}; highest "
        f"learning rate that learns: {reach[0]} against {reach[1]}"
    )


def _claims(results: report.Results) -> report.Table:
    models = results["models"]
    collapsed = sum("entropy_collapse" in m["findings"] for m in models)
    broken = sum(
        "entropy_collapse" in m["findings"] and m["diverged_at"] is not None for m in models
    )
    return report.claims(
        [
            ("Zhai et al. 2023, arXiv 2303.06296",
             "Entropy collapse precedes divergence.",
             f"entropy collapses in {collapsed} of {len(models)} trainings; {broken} of these "
             f"diverge, and {sum(m['diverged_at'] is not None for m in models)} of all"),
            ("Henry et al. 2020, arXiv 2010.04245 (second-hand)",
             "Normalised queries and keys with a learned scale: +0.93 BLEU on small data.",
             _changed(results, "QK norm")),
            ("Vaswani et al. 2017, arXiv 1706.03762, §3.2.1",
             "Without the scale the softmax has extremely small gradients.",
             _changed(results, "no scale")),
            ("Clipping", "–", _changed(results, "clipping")),
            ("A soft cap on the logits", "–", _changed(results, "soft cap")),
        ]
    )  # fmt: skip
