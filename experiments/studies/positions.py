"""Extrapolation of position schemes to inputs longer than any trained on."""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions
from experiments.errors import UsageError
from experiments.report import blocks as report

# As experiments.schemes.SCHEMES, which would load JAX.
SCHEMES = (
    "none", "log-n", "sinusoidal", "learned", "rotary", "rotary-linear", "rotary-ntk",
    "rotary-yarn", "alibi", "t5", "shaw", "transformer-xl",
)  # fmt: skip
TASKS = ("max", "copy", "reverse", "sort")


@dataclasses.dataclass(frozen=True)
class Positions(TrainingOptions):
    """Which position schemes carry over to inputs longer than any trained on?

    A small causal Transformer is trained with each scheme on lists of up to --length, and tested on
    longer ones: max retrieval, copying, reversing, sorting. Schemes: none, none with log-n scaled
    logits, sinusoidal, learned, rotary (as it is, and with linear, NTK and YaRN scaling at test
    time), ALiBi, T5, Shaw, Transformer-XL.

    Beside it: ALiBi (arXiv 2108.12409), T5 (1910.10683), RoFormer (2104.09864), Kazemnejad et
    al. 2023 (2305.19466), scalable softmax (2501.19399), Chiang and Cholak 2022 (2202.12172).

    Command: python -m experiments positions. Takes 5 minutes on two cores; quick 1 minute, full 3
    hours.
    Expected: the retrieval of a maximum fades with the length, least with log-n; learned and
    sinusoidal positions and rotary without a scaling disturb it more than none, T5 and Shaw less.
    """

    schemes: tuple[str, ...] = SCHEMES
    """Position schemes."""
    tasks: tuple[str, ...] = FROM_PRESET
    """max, copy, reverse, sort."""
    length: int = 16
    """The longest list trained on."""
    ratios: tuple[int, ...] = FROM_PRESET
    """Test lengths over the trained one; 1 is always among them."""

    study: ClassVar[str] = "positions"
    defaults: ClassVar = {"learning_rate": 0.003}
    choices: ClassVar = {"schemes": SCHEMES, "tasks": TASKS}
    intervals: ClassVar = {"length": "[4, inf)", "batch_size": "[4, inf)"}
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "tasks": ("max",), "ratios": (1, 2, 4), "steps": 150, "batch_size": 32, "seeds": 1,
        },
        "default": {
            "tasks": ("max", "sort", "copy"), "ratios": (1, 2, 4, 8), "steps": 400,
            "batch_size": 32, "seeds": 1,
        },
        "full": {
            "tasks": TASKS, "ratios": (1, 2, 4, 8, 16, 64), "steps": 5000, "batch_size": 64,
            "seeds": 3,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        if self.batch_size and self.batch_size % 4:
            raise UsageError(f"--batch-size {self.batch_size} must be a multiple of 4")

    def run(self) -> Path:
        """Train with each scheme, test at each length and write the report."""
        from experiments import schemes

        trained = dict.fromkeys(schemes.trained_as(scheme) for scheme in self.schemes)
        models = {
            f"{task}-{scheme}-seed{seed}": (task, scheme, seed)
            for task, scheme, seed in itertools.product(self.tasks, trained, range(self.seeds))
        }
        with RunFolder.open(self, len(models) * self.steps) as run:
            return run.conclude(_results(self, run.all_trained(models, _train)), build_report)


_TESTED = 256  # problems at each length, fewer at long ones
_TESTED_PLACES = 2**14  # their total length, at most


def _ratios(options: Positions) -> list[int]:
    return sorted({1, *(options.ratios or ())})


def _train(
    options: Positions, run: RunFolder, key: str, task: str, scheme: str, seed: int
) -> dict[str, Any]:
    from experiments import schemes
    from experiments.data import tasks
    from experiments.models import reader

    longest = options.length

    def room(ratio: int) -> int:
        """Length of the longest list at a ratio, with its answers."""
        return ratio * longest + tasks.answers_of(task, ratio * longest)

    def problems(step: int) -> tasks.Batch:
        """Problems of four lengths, any up to the longest."""
        rng = tasks.generator(task, seed, step)
        size = (options.batch_size or 4) // 4
        lengths = rng.integers(1, longest, size=4, endpoint=True).tolist()
        made = [tasks.TASKS[task](rng, size, length) for length in lengths]
        return tasks.joined([tasks.causal(some, room(1)) for some in made])

    ratios = _ratios(options)
    # A causal model does not attend to trailing padding, so one shape suffices for longer tests.
    tests = {r: _test(task, seed, r * longest, room(1 if r == 1 else ratios[-1])) for r in ratios}
    longer = [lambda m, r=r: reader.prepare_observe(m, tests[r]) for r in ratios[-1:] if r > 1]
    asked = reader.task(
        f"{task}, {scheme}, seed {seed}",
        _model(options, scheme, 1, seed, task),
        problems,
        tests[1],
        seed=seed,
        besides=() if scheme in schemes.STRETCHED else longer,
    )
    recipe = reader.recipe(options.steps, options.learning_rate)
    model, history = run.train(key, asked, recipe)
    tested = [
        {"scheme": other, "ratio": ratio, **_look(options, model, other, ratio, seed, task, tests)}
        for other in options.schemes
        if schemes.trained_as(other) == scheme
        for ratio in ratios
    ]
    recorded = reader.record(model, history)
    return {"task": task, "scheme": scheme, "seed": seed, **recorded, "tested": tested}


def _test(task: str, seed: int, length: int, places: int) -> Any:
    """Return the test problems of one length."""
    from experiments.data import tasks

    count = max(16, min(_TESTED, _TESTED_PLACES // places))
    rng = tasks.generator(f"{task} {length}", seed, tasks.HELD_OUT)
    return tasks.causal(tasks.TASKS[task](rng, count, length), places)


def _model(options: Positions, scheme: str, ratio: int, seed: int, task: str) -> Any:
    """Return a fresh model with the scheme at this ratio."""
    from flax import nnx

    from experiments import schemes
    from experiments.data import tasks
    from experiments.models import reader

    size = reader.Size()
    trained = options.length + tasks.answers_of(task, options.length)
    layer = schemes.layer(
        scheme, trained=trained, tested=trained * ratio, width=size.features,
        head_depth=size.features // size.heads,
    )  # fmt: skip
    longest = trained * _ratios(options)[-1]
    return reader.Reader(
        size, layer, position_embedding=schemes.position_embedding(scheme), length=longest,
        rngs=nnx.Rngs(seed),
    )  # fmt: skip


def _look(
    options: Positions, model: Any, scheme: str, ratio: int, seed: int, task: str, tests: Any
) -> dict[str, float]:
    """Return the scores of a trained model at one ratio, with the scheme at that ratio."""
    from flax import nnx

    from experiments import schemes
    from experiments.data import tasks
    from experiments.models import reader

    batch = tests[ratio]
    if scheme in schemes.STRETCHED and ratio > 1:
        stretched = _model(options, scheme, ratio, seed, task)
        nnx.update(stretched, nnx.state(model))
        model = stretched
        if scheme == "log-n":  # it goes by the number of keys, so there must be no padding
            length = ratio * options.length
            batch = _test(task, seed, length, length + tasks.answers_of(task, length))
    return reader.observe(model, batch)


def _results(options: Positions, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the study's part of results.json."""
    from experiments.data import tasks

    ratios = _ratios(options)
    accuracy: dict[str, dict[str, list[list[float]]]] = {}
    for task in options.tasks or ():
        rows = {scheme: [[] for _ in ratios] for scheme in options.schemes}
        for cell in done:
            for test in cell["tested"] if cell["task"] == task else ():
                rows[test["scheme"]][ratios.index(test["ratio"])].append(test["accuracy"])
        accuracy[task] = rows
    return {
        "trained_length": options.length,
        "ratios": ratios,
        "accuracy": accuracy,
        "mean_accuracy": {
            task: {s: [statistics.fmean(v) for v in row] for s, row in rows.items()}
            for task, rows in accuracy.items()
        },
        "chance": {task: tasks.CHANCE[task] for task in accuracy},
        "models": done,
    }


_TASKS = {"max": "max retrieval", "copy": "copying", "reverse": "reversing", "sort": "sorting"}
WORDS = {
    "none": "no positions",
    "log-n": "none, log-n logits",
    "rotary-linear": "rotary, linear",
    "rotary-ntk": "rotary, NTK",
    "rotary-yarn": "rotary, YaRN",
    "alibi": "ALiBi",
    "t5": "T5 buckets",
    "shaw": "Shaw",
    "transformer-xl": "Transformer-XL",
}
# A model with this accuracy at the trained length has learnt the task.
_LEARNT = 0.6


def words(scheme: str) -> str:
    """Return the words for a scheme."""
    return WORDS.get(scheme, scheme)


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings, ratios, length = results["settings"], results["ratios"], results["trained_length"]
    how = (
        f"A causal Transformer of two layers, width 64 and four heads is trained for "
        f"{settings['steps']:,} steps of {settings['batch_size']} lists of 1 to {length} symbols, "
        "and tested on new lists of that length and longer ones. Right is the share of answered "
        "symbols that are right, each given the right ones before it. The rotary variants are one "
        "trained model, tested with a scaling."
    )
    panels, tables = [], []
    for task, rows in results["accuracy"].items():
        series = {
            words(scheme): [
                [(r, 100 * values[seed]) for r, values in zip(ratios, row, strict=True)]
                for seed in range(len(row[0]))
            ]
            for scheme, row in rows.items()
        }
        panels.append((_TASKS[task], series))
        tables.append(
            report.Table(
                f"{report.capital(_TASKS[task])}: right answers, by length "
                f"(chance {100 * results['chance'][task]:.0f} %)",
                ["scheme", *(f"{r} × {length}" for r in ratios)],
                [
                    [words(s), *(report.mean_sd(v, percent=True) for v in row)]
                    for s, row in rows.items()
                ],
            )
        )
    drawn = report.picture(
        folder, "accuracy", "curves", panels, x="test length / trained length", y="right, %",
        log_x=True, markers=True, low_y=0, mark_y=(10.0, "chance"),
        alt="Right answers with each scheme against test length; the numbers are in the tables "
        "below.",
        caption="Right answers against test length over trained length, mean and range over the "
        "seeds.",
    )  # fmt: skip
    return report.Report(
        title="Train short, test long: positions",
        answer=[said for task in results["accuracy"] for said in _answer(results, task)],
        warnings=report.diverged(
            (f"{_TASKS[m['task']]} with {words(m['scheme'])}, seed {m['seed']},", m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            report.Section("Accuracy against length", [how], [drawn, *tables]),
            report.Section(
                "What the papers say",
                [],
                [report.claims((*row[:2], _ours(results, row[2])) for row in _PAPERS)],
            ),
        ],
    )


def learnt(results: report.Results, task: str) -> list[str]:
    """Return the schemes that had learnt the task at the trained length."""
    rows = results["mean_accuracy"][task]
    return [scheme for scheme, row in rows.items() if row[0] >= _LEARNT]


def kept(results: report.Results, task: str) -> dict[str, float]:
    """Return the mean accuracy past the trained length of the schemes that learnt, best first."""
    rows = results["mean_accuracy"][task]
    means = {s: sum(rows[s][1:]) / max(len(rows[s]) - 1, 1) for s in learnt(results, task)}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _answer(results: report.Results, task: str) -> list[str]:
    rows, ratios, good = results["mean_accuracy"][task], results["ratios"], learnt(results, task)
    if not good:
        return [
            f"No scheme has learnt {_TASKS[task]} in {results['settings']['steps']:,} steps "
            f"(right at least {100 * _LEARNT:.0f} % at the trained length), so nothing can be "
            "said of longer lists."
        ]
    said = []
    if len(ratios) > 1:
        means = report.listed(kept(results, task), ".0f", percent=True, words=words)
        said.append(
            f"{report.capital(_TASKS[task])}, right on average over {ratios[1]} to {ratios[-1]} "
            f"times the trained length: {means}."
        )
    poor = {s: row[0] for s, row in rows.items() if s not in good}
    if poor:
        share = report.listed(poor, ".0f", percent=True, words=words)
        said.append(f"{report.capital(_TASKS[task])} is not learnt in so few steps with {share}.")
    return said


def _ours(results: report.Results, schemes: Sequence[str]) -> str:
    """Return the results of these schemes at the longest test, in words."""
    parts = []
    for task, rows in results["mean_accuracy"].items():
        found = {s: rows[s][-1] for s in schemes if s in rows}
        if found:
            shares = report.listed(found, ".0f", percent=True, words=words)
            parts.append(f"{_TASKS[task]} at {results['ratios'][-1]} times the length: {shares}")
    return "; ".join(parts)


_PAPERS = (
    (
        "Press et al. 2021, arXiv 2108.12409",
        "ALiBi trained at 1,024 and tested at 2,048 equals sinusoidal trained at 2,048.",
        ("alibi", "sinusoidal"),
    ),
    (
        "Raffel et al. 2020, arXiv 1910.10683",
        "32 buckets, log-spaced to distance 128; all farther ones share the last.",
        ("t5",),
    ),
    (
        "Su et al. 2021, arXiv 2104.09864",
        "Rotary positions: 27.5 BLEU on WMT14 en-de against 27.3 with sinusoidal.",
        ("rotary", "sinusoidal"),
    ),
    (
        "Kazemnejad et al. 2023, arXiv 2305.19466",
        "Decoder-only models generalise best to longer inputs with no position encoding.",
        ("none", "alibi", "t5", "rotary"),
    ),
    (
        "Nakanishi 2025, arXiv 2501.19399; Chiang and Cholak 2022, arXiv 2202.12172",
        "Logits times log n keep the weights sharp on longer inputs.",
        ("log-n", "none"),
    ),
)
