"""The gain of a small student from a larger teacher, by the distillation loss."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions, check_heads
from experiments.errors import UsageError
from experiments.report import blocks as report

# As experiments.distilling.WAYS, which would load JAX.
WAYS = ("none", "logits", "logits and maps", "sequences")


@dataclasses.dataclass(frozen=True)
class Distill(TrainingOptions):
    """What does a small student gain from a larger teacher, by what it is shown?

    A teacher of 2 layers and width 128 learns to translate the grammar's sentences; then students
    of 1 layer and width 32 learn, all in the same steps: from the references alone, with the
    teacher's logits, with its logits and its attention maps, or from the teacher's own translations
    in place of the references. BLEU, held-out loss, size.

    Beside it: Kim and Rush 2016 (arXiv 1606.07947), Hinton et al. 2015 (1503.02531), Jiao et
    al. 2020 (1909.10351) on maps.

    Command: python -m experiments distill. Takes 5 minutes on two cores; quick 1 minute, with a
    teacher of 1 layer and width 64 and shorter sentences; full 2 hours.
    Expected: logits help over none, maps a little more; the teacher stays ahead.
    """

    ways: tuple[str, ...] = WAYS
    """What students learn from: none, logits, "logits and maps", sequences."""
    teacher_steps: int = FROM_PRESET
    """Training steps of the teacher."""
    teacher_layers: int = FROM_PRESET
    """Layers of the teacher's encoder, and of its decoder."""
    teacher_features: int = FROM_PRESET
    """Width of the teacher."""
    layers: int = 1
    """Layers of the student's encoder, and of its decoder."""
    features: int = FROM_PRESET
    """Width of the student."""
    heads: int = 4
    """Heads of each attention, of both."""
    temperature: float = 2.0
    """Of the predictions, where logits are shown."""
    maps_weight: float = 1.0
    """The weight of the maps' divergence in the loss, where maps are shown."""
    train_size: int = FROM_PRESET
    """Training sentences to make, the longer ones to be left out."""
    test_size: int = FROM_PRESET
    """Test sentences to make, the longer ones to be left out."""
    keep_shortest: float = FROM_PRESET
    """Share of the sentences to keep at least, the shortest ones."""

    study: ClassVar[str] = "distill"
    choices: ClassVar = {"ways": WAYS}
    intervals: ClassVar = {"temperature": "(0, inf)", "keep_shortest": "(0, 1]"}
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "seeds": 1, "steps": 200, "teacher_steps": 240, "batch_size": 32, "teacher_layers": 1,
            "teacher_features": 64, "features": 32, "train_size": 2000, "test_size": 200,
            "keep_shortest": 0.3, "learning_rate": 1e-2,
        },
        "default": {
            "seeds": 1, "steps": 500, "teacher_steps": 600, "batch_size": 64, "teacher_layers": 2,
            "teacher_features": 128, "features": 32, "train_size": 4000, "test_size": 200,
            "keep_shortest": 0.5, "learning_rate": 5e-3,
        },
        "full": {
            "seeds": 3, "steps": 3000, "teacher_steps": 3000, "batch_size": 64, "teacher_layers": 2,
            "teacher_features": 128, "features": 32, "train_size": 20_000, "test_size": 600,
            "keep_shortest": 0.5, "learning_rate": 5e-3,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        if self.teacher_layers is not None and self.teacher_layers % self.layers:
            raise UsageError(
                f"--teacher-layers {self.teacher_layers} must be a multiple of --layers "
                f"{self.layers}"
            )
        check_heads("--features", self.features, self.heads)
        check_heads("--teacher-features", self.teacher_features, self.heads)

    def run(self) -> Path:
        """Train the teachers and their students, and write the report."""
        each = self.teacher_steps + len(self.ways) * self.steps
        with RunFolder.open(self, self.seeds * each) as run:
            cells = [cell for s in range(self.seeds) for cell in _School(self, run, s).cells()]
            return run.conclude(_results(self, cells), build_report)


_TEACHER = "teacher"


class _School:
    """One seed's teacher and students; the trained teacher is kept until the run ends."""

    def __init__(self, options: Distill, run: RunFolder, seed: int):
        self.options, self.run, self.seed = options, run, seed

    def cells(self) -> list[dict[str, Any]]:
        """Return the finished cells of the teacher and of each student."""
        options, run = self.options, self.run
        steps, teacher = options.teacher_steps, self._key(_TEACHER)
        cells = [
            run.trained(teacher, steps, lambda: self._cell(_TEACHER, *self.teacher), keep=True)
        ]
        for way in options.ways:
            work = functools.partial(self._student, way)
            cells.append(run.trained(self._key(way), options.steps, work))
        return cells

    def _key(self, way: str) -> str:
        return f"{way.replace(' ', '-')}-seed{self.seed}"

    @functools.cached_property
    def text(self) -> Any:
        """The sentences."""
        from experiments import translation

        options = self.options
        return translation.grammar(
            self.seed, batch_size=options.batch_size, train_size=options.train_size,
            test_size=options.test_size, keep_shortest=options.keep_shortest,
        )  # fmt: skip

    @functools.cached_property
    def teacher(self) -> Any:
        """The trained teacher and its history, from its checkpoint if it is there."""
        options = self.options
        if self.run.has(self._key(_TEACHER)):
            self.run.progress.skip(-options.teacher_steps)  # restoring counts them again
        width, steps = options.teacher_features, options.teacher_steps
        return self._train(_TEACHER, options.teacher_layers, width, steps)

    @functools.cached_property
    def translations(self) -> dict[int, list[int]]:
        """The teacher's translations of the training sentences."""
        from experiments import distilling

        def compute() -> dict[str, Any]:
            words = "the teacher translates the training sentences"
            self.run.progress.say(f"seed {self.seed}: {words}")
            said = distilling.all_translations(self.teacher.model, self.text)
            return {str(index): ids for index, ids in said.items()}

        found = self.run.cell(f"translations-seed{self.seed}", compute)
        return {int(index): ids for index, ids in found.items()}

    def _train(self, way: str, layers: int, width: int, steps: int, **lesson: Any) -> Any:
        from experiments import translation
        from experiments.models import seq2seq

        size = seq2seq.Size(layers, self.options.heads, width, 2 * width)
        fresh = translation.fresh(self.text, size)
        task = translation.task(f"{way}, seed {self.seed}", fresh, self.text, **lesson)
        recipe = translation.recipe(steps, self.options.learning_rate)
        return self.run.train(self._key(way), task, recipe)

    def _student(self, way: str) -> dict[str, Any]:
        from experiments import distilling

        options = self.options
        deeper = options.teacher_layers // options.layers
        loss, batch_at = distilling.lesson(
            way,
            self.text,
            teacher=self.teacher.model if "logits" in way else None,
            said=self.translations if way == "sequences" else {},
            loss=distilling.Distillation(options.temperature, options.maps_weight, deeper),
        )
        width, steps = options.features, options.steps
        trained = self._train(way, options.layers, width, steps, loss=loss, batch_at=batch_at)
        return self._cell(way, *trained)

    def _cell(self, way: str, trained: Any, history: Any) -> dict[str, Any]:
        from experiments import translation

        kept = translation.record(trained, history)
        quality = translation.quality(trained, self.text)
        return {"way": way, "seed": self.seed, **kept, **quality}


def _results(options: Distill, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the study's part of results.json."""
    summary = {}
    for way in (_TEACHER, *options.ways):
        own = [cell for cell in cells if cell["way"] == way]
        summary[way] = {
            "parameters": own[0]["parameters"],
            **{
                name: [cell[name] for cell in own]
                for name in ("bleu", "valid_loss", "step_milliseconds", "diverged_at")
            },
        }
    return {"summary": summary, "models": cells}


WORDS = {
    "teacher": "the teacher", "none": "references alone", "logits": "logits",
    "logits and maps": "logits and maps", "sequences": "teacher's sentences",
}  # fmt: skip
_LEARNT = 5.0  # BLEU: with less there is nothing to rank students by


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings, summary = results["settings"], results["summary"]
    how = (
        f"The teacher has {settings['teacher_layers']} + {settings['teacher_layers']} layers and "
        f"width {settings['teacher_features']} and trains for {settings['teacher_steps']:,} steps; "
        f"students have {settings['layers']} + {settings['layers']} layers and width "
        f"{settings['features']} and train for {settings['steps']:,} steps of "
        f"{settings['batch_size']} sentences of the English–German grammar, from the same start "
        f"with the same batches. All have {settings['heads']} heads. Logits: half the loss is the "
        f"divergence from the teacher's predictions at temperature {settings['temperature']:g}. "
        "Maps: the divergence of every attention's map from that of the teacher's layer, with "
        f"weight {settings['maps_weight']:g}. Translations are greedy."
    )
    bleu = report.picture(
        folder, "bleu", "bars", [WORDS[way] for way in summary],
        {"BLEU": [found["bleu"] for found in summary.values()]}, x="learnt from", y="BLEU",
        alt="BLEU of the teacher and of each student; the numbers are in the table.",
        caption="BLEU of the teacher and of students by what they learn from, with the deviation "
        "over the seeds where there are several.",
    )  # fmt: skip
    table = report.Table(
        f"After training ({report.seeds(results)})",
        ["learnt from", "parameters", "BLEU", "held-out loss", "ms a step"],
        [
            [
                WORDS[way],
                f"{found['parameters']:,}",
                report.mean_sd(found["bleu"]),
                report.mean_sd(found["valid_loss"], 3),
                report.mean_sd(found["step_milliseconds"], 0),
            ]
            for way, found in summary.items()
        ],
        note="The time of a step leaves out what the teacher computes for it.",
    )
    curves = {"valid_loss": "Held-out loss, nats", "entropy": "Entropy of the attention / ln S"}
    during = [
        report.training(folder, results["models"], name, words, line=lambda m: WORDS[m["way"]])
        for name, words in curves.items()
    ]
    return report.Report(
        title="What a student learns from a teacher",
        answer=_answer(results),
        warnings=report.diverged(
            (f"{WORDS[m['way']]}, seed {m['seed']},", m["diverged_at"]) for m in results["models"]
        ),
        sections=[
            report.Section("After training", [how], [bleu, table]),
            report.Section("During training", [], during),
            report.Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _means(results: report.Results) -> dict[str, float]:
    """Return the mean BLEU of each way of learning, 0 where no seed has one."""
    return {way: report.mean(found["bleu"]) or 0.0 for way, found in results["summary"].items()}


def _learnt(results: report.Results) -> bool:
    """Return whether the best student can translate, so that students can be compared."""
    return max(v for way, v in _means(results).items() if way != "teacher") >= _LEARNT


def gains(results: report.Results) -> dict[str, float]:
    """Return the mean BLEU gain of each way over the references alone."""
    means = _means(results)
    others = [way for way in means if "none" in means and way not in ("none", "teacher")]
    return {way: means[way] - means["none"] for way in others}


def _answer(results: report.Results) -> list[str | None]:
    summary, means = results["summary"], _means(results)
    students = {way: bleu for way, bleu in means.items() if way != "teacher"}
    best = max(students, key=students.__getitem__)
    if not _learnt(results):
        return [
            f"The teacher has BLEU {means['teacher']:.1f} and the best student "
            f"{students[best]:.1f}: in {results['settings']['steps']:,} steps none has learnt to "
            "translate, so nothing can be said of what each learnt from."
        ]
    smaller = summary["teacher"]["parameters"] / summary[best]["parameters"]
    gained = report.listed(gains(results), "+.1f", words=WORDS.__getitem__)
    maps = means.get("logits and maps", 0.0) - means.get("logits", 0.0)
    return [
        f"BLEU of the teacher {means['teacher']:.1f}; of students with {smaller:.0f} times fewer "
        "parameters, by what they learn from, best first: "
        f"{report.listed(students, best=max, words=WORDS.__getitem__)}.",
        f"Over the references alone: {gained} BLEU." if gained else None,
        f"Maps beside logits change BLEU by {maps:+.1f}."
        if {"logits", "logits and maps"} <= means.keys()
        else None,
    ]


def _claims(results: report.Results) -> report.Table:
    gained = gains(results) if _learnt(results) else {}

    def ours(*ways: str) -> str:
        own = {f"{WORDS[way]}": gained[way] for way in ways if way in gained}
        return report.listed(own, "+.1f") + " BLEU" if own else ""

    return report.claims(
        [
            ("Kim and Rush 2016, arXiv 1606.07947",
             "Learning from the teacher's translations: +4.2 BLEU with greedy decoding.",
             ours("sequences")),
            ("Hinton et al. 2015, arXiv 1503.02531",
             "Softened predictions tell how a model generalises.",
             ours("logits")),
            ("Jiao et al. 2020, arXiv 1909.10351",
             "Maps beside logits help a small student.",
             ours("logits", "logits and maps")),
        ]
    )  # fmt: skip
