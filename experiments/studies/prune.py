"""Pruning of heads of a translation model, by importance and at random."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions, check_heads
from experiments.report import blocks as report

PARTS = ("self", "cross")
ORDERS = ("importance", "random")


@dataclasses.dataclass(frozen=True)
class Prune(TrainingOptions):
    """How many heads can a translation model lose, and does it matter which?

    A small Transformer learns to translate the grammar's sentences. Then its heads go, ever more of
    them: the least important first (by the gradient of a gate before each head) or at random, those
    of self-attention and those of the attention to the source apart; every attention keeps one.
    BLEU and held-out loss by number of heads removed, without training again.

    Beside it: Michel et al. 2019 (arXiv 1905.10650), Voita et al. 2019 (1905.09418), Vaswani et
    al. 2017 (1706.03762) Table 3 rows A.

    Command: python -m experiments prune. Takes 4 minutes on two cores; quick 50 s, full 90
    minutes.
    Expected: some heads go without notice, more by importance than at random; the attention to the
    source bears it least.
    """

    layers: int = FROM_PRESET
    """Layers of the encoder, and of the decoder."""
    heads: int = FROM_PRESET
    """Heads of each attention, two or more."""
    features: int = FROM_PRESET
    """Width of the model, half that of its feed-forward part; a head has this over --heads."""
    train_size: int = FROM_PRESET
    """Training sentences to make."""
    test_size: int = FROM_PRESET
    """Test sentences to make; the longer half is left out."""
    points: int = FROM_PRESET
    """Numbers of removed heads to measure at, beside none."""
    draws: int = FROM_PRESET
    """Random orders of each seed."""

    study: ClassVar[str] = "prune"
    defaults: ClassVar = {"learning_rate": 0.005}
    intervals: ClassVar = {"heads": "[2, inf)"}
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "seeds": 1, "steps": 450, "batch_size": 32, "layers": 1, "heads": 8, "features": 64,
            "train_size": 4000, "test_size": 80, "points": 3, "draws": 1,
        },
        "default": {
            "seeds": 1, "steps": 700, "batch_size": 64, "layers": 2, "heads": 8, "features": 96,
            "train_size": 20_000, "test_size": 200, "points": 5, "draws": 2,
        },
        "full": {
            "seeds": 3, "steps": 4000, "batch_size": 64, "layers": 2, "heads": 8, "features": 128,
            "train_size": 60_000, "test_size": 600, "points": 10, "draws": 5,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        check_heads("--features", self.features, self.heads)

    def run(self) -> Path:
        """Train, remove heads, and write the report."""
        models = {f"seed{seed}": (seed,) for seed in range(self.seeds)}
        with RunFolder.open(self, self.seeds * self.steps) as run:
            return run.conclude(_results(self, run.all_trained(models, _train)), build_report)


def _train(options: Prune, run: RunFolder, key: str, seed: int) -> dict[str, Any]:
    from experiments import heads, translation
    from experiments.models import seq2seq

    text = translation.grammar(
        seed, batch_size=options.batch_size, train_size=options.train_size,
        test_size=options.test_size,
    )  # fmt: skip
    size = seq2seq.Size(options.layers, options.heads, options.features, 2 * options.features)
    task = translation.task(f"seed {seed}", translation.fresh(text, size), text)
    recipe = translation.recipe(options.steps, options.learning_rate)
    trained, history = run.train(key, task, recipe)
    run.progress.say(f"seed {seed}: trained; taking heads away")
    worth = heads.importance(trained, text)
    counts = {"points": options.points, "draws": options.draws}
    return {
        "seed": seed,
        **translation.record(trained, history),
        "importance": worth,
        "curves": heads.curves(trained, text, worth, **counts),
        "pruned": [heads.pruned(trained, text, worth, part) for part in PARTS],
    }


def _results(options: Prune, models: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the study's part of results.json."""
    parts: dict[str, Any] = {}
    for part in PARTS:
        own = [point for cell in models for point in cell["curves"] if point["part"] == part]
        removed = sorted({point["removed"] for point in own})
        worth = models[0]["importance"]
        there = sum(len(v) for path, v in worth.items() if f"{part}_attention" in path)
        parts[part] = {
            "heads": there,
            "removed": removed,
            **{
                measure: {
                    order: [
                        [p[measure] for p in own if (p["order"], p["removed"]) == (order, count)]
                        for count in removed
                    ]
                    for order in ORDERS
                }
                for measure in ("bleu", "valid_loss")
            },
        }
    return {"parts": parts, "models": models}


WORDS = {"self": "self-attention", "cross": "attention to the source"}
_ORDERS = {"importance": "least important first", "random": "at random"}
_UNNOTICED = 0.98  # of the whole model's BLEU
_LEARNT = 5.0  # BLEU: with less, removing heads measures nothing


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]
    how = (
        f"A Transformer of {settings['layers']} + {settings['layers']} layers, width "
        f"{settings['features']} and {settings['heads']} heads, trained for {settings['steps']:,} "
        f"steps of {settings['batch_size']} sentences of the English–German grammar. A head is "
        "important as the mean loss depends on a gate before it (Michel et al., eq. 2), divided by "
        "the length of its attention's values. Every attention keeps one head; nothing is trained "
        "again after heads are removed."
    )
    drawn = [
        _draw(results, folder, "bleu", "BLEU"),
        _draw(results, folder, "valid_loss", "held-out loss, nats"),
    ]
    tables = [_table(results, part) for part in results["parts"]]
    return report.Report(
        title="Fewer heads",
        answer=_answer(results),
        warnings=report.diverged(
            (f"seed {m['seed']}", m["diverged_at"]) for m in results["models"]
        ),
        sections=[
            report.Section("Quality against heads removed", [how], [*drawn, *tables]),
            report.Section("The heads", [], [_importance(results), _saved(results)]),
            report.Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _means(results: report.Results, part: str, order: str) -> list[float]:
    """Return the mean BLEU by number of heads removed, 0 where no seed has one."""
    return [report.mean(values) or 0.0 for values in results["parts"][part]["bleu"][order]]


def unnoticed(results: report.Results, part: str, order: str) -> int:
    """Return how many heads of a part can be removed with 98 % of the full model's BLEU or more."""
    means = _means(results, part, order)
    found = 0
    for count, bleu in zip(results["parts"][part]["removed"], means, strict=True):
        if bleu < _UNNOTICED * means[0]:
            break
        found = count
    return found


def half(results: report.Results, part: str) -> tuple[int, float]:
    """Return about half of the removable heads, of the numbers measured, and the BLEU they cost.

    The least important heads are removed; the cost is a share of the whole model's BLEU.
    """
    removed, means = results["parts"][part]["removed"], _means(results, part, "importance")
    count = min(removed[1:], key=lambda n: abs(n - removed[-1] / 2))
    return count, 1 - means[removed.index(count)] / means[0] if means[0] else 0.0


def _answer(results: report.Results) -> list[str]:
    whole = _means(results, "self", "importance")[0]
    said = [f"The whole model has BLEU {whole:.1f}."]
    if whole < _LEARNT:
        return [
            *said,
            f"It has not learnt to translate in {results['settings']['steps']:,} steps, so nothing "
            "can be said of its heads.",
        ]
    for part, found in results["parts"].items():
        gone = {order: unnoticed(results, part, order) for order in _ORDERS}
        last = {order: _means(results, part, order)[-1] for order in _ORDERS}
        said.append(
            f"Of {found['heads']} heads of {WORDS[part]}, {gone['importance']} go with at most 2 % "
            f"of BLEU lost where the least important go first, {gone['random']} at random; with "
            f"{found['removed'][-1]} gone BLEU is {last['importance']:.1f} and "
            f"{last['random']:.1f}."
        )
    halves = {part: half(results, part) for part in results["parts"]}
    worst = max(halves, key=lambda part: halves[part][1])
    costs = report.joined(
        f"{count} heads of {WORDS[part]} cost {100 * share:.0f} % of BLEU"
        for part, (count, share) in halves.items()
    )
    return [
        *said,
        f"About half of what may go, the least important first: {costs}; {WORDS[worst]} bears it "
        "least.",
    ]


def _draw(results: report.Results, folder: Path, measure: str, words: str) -> report.Picture:
    panels = []
    for part, found in results["parts"].items():
        series = {
            _ORDERS[order]: [
                [(count, values[run]) for count, values in zip(found["removed"], rows, strict=True)]
                for run in range(len(rows[0]))
            ]
            for order, rows in found[measure].items()
        }
        panels.append((f"{WORDS[part]}, {found['heads']} heads", series))
    return report.picture(
        folder, measure, "curves", panels, x="heads removed", y=words, markers=True,
        low_y=0 if measure == "bleu" else None,
        alt=f"{report.capital(words)} against heads removed; the numbers are in the tables below.",
        caption=f"{report.capital(words)} against heads removed, mean and range over seeds and "
        "random orders.",
    )  # fmt: skip


def _table(results: report.Results, part: str) -> report.Table:
    found = results["parts"][part]
    rows = [
        [
            f"{count}",
            *(report.mean_sd(found["bleu"][order][at]) for order in _ORDERS),
            *(report.mean_sd(found["valid_loss"][order][at], 3) for order in _ORDERS),
        ]
        for at, count in enumerate(found["removed"])
    ]
    columns = [f"{what}, {words}" for what in ("BLEU", "loss") for words in _ORDERS.values()]
    return report.Table(
        f"{report.capital(WORDS[part])}: {found['heads']} heads ({report.seeds(results)})",
        ["heads removed", *columns],
        rows,
        note="At random the spread is over the orders too.",
    )


def _importance(results: report.Results) -> report.Table:
    cells = results["models"]
    most = max(len(values) for values in cells[0]["importance"].values())
    rows = [
        [path, *(report.mean_sd([c["importance"][path][n] for c in cells], 2) for n in range(most))]
        for path in cells[0]["importance"]
    ]
    columns = ["attention", *(f"head {n}" for n in range(most))]
    return report.Table("Importance of the heads", columns, rows)


def _saved(results: report.Results) -> report.Table:
    rows = []
    for at, part in enumerate(results["parts"]):
        made = [cell["pruned"][at] for cell in results["models"]]
        sizes = f"{results['models'][0]['parameters']:,} → {made[0]['parameters']:,}"
        most = report.number(max(report.known(p["difference"] for p in made), default=None), ".1e")
        rows.append([WORDS[part], str(made[0]["removed"]), sizes, most])
    return report.Table(
        "Half of what may go, pruned for good (prune_heads)",
        ["part", "heads removed", "parameters", "largest difference of a logit"],
        rows,
        note="The difference is that between the smaller model and the old one with the outputs of "
        "those heads set to 0.",
    )


def _claims(results: report.Results) -> report.Table:
    learnt = _means(results, "self", "importance")[0] >= _LEARNT
    total = sum(found["heads"] for found in results["parts"].values())
    gone = {part: unnoticed(results, part, "importance") for part in results["parts"]}
    share = sum(gone.values()) / total
    both = report.joined(f"{100 * half(results, part)[1]:.0f} % in {WORDS[part]}" for part in gone)
    michel = "Michel et al. 2019, arXiv 1905.10650 (second-hand)"
    rows = [
        (
            michel,
            "About 20 % of the heads of a WMT model go without notice.",
            f"{sum(gone.values())} of {total}, each part by itself: {100 * share:.0f} %",
        ),
        (
            michel,
            "The attention to the source is the most sensitive.",
            f"BLEU lost with about half of what may go gone: {both}",
        ),
        (
            "Voita et al. 2019, arXiv 1905.09418",
            "38 of 48 encoder heads go for 0.15 BLEU, trained to go.",
            f"{gone['self']} of {results['parts']['self']['heads']} heads of self-attention go for "
            "at most 2 % of BLEU, not trained again",
        ),
        (
            "Vaswani et al. 2017, arXiv 1706.03762, Table 3 (A)",
            "1, 4, 8, 16, 32 heads at constant compute: BLEU 24.9, 25.5, 25.8, 25.8, 25.4.",
            "not trained with other numbers of heads",
        ),
    ]
    return report.claims((*row[:2], row[2] if learnt else "") for row in rows)
