"""What a small student gains from a larger teacher, by what it is shown."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_choice, check_positive, flag
from experiments.errors import UsageError
from experiments.report import blocks as report

# As experiments.distilling.WAYS, which would load JAX.
WAYS = ("none", "logits", "logits and maps", "sequences")


@dataclasses.dataclass(frozen=True)
class Distill(StudyOptions):
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
    steps: int | None = None
    """Training steps of each student."""
    teacher_steps: int | None = None
    """Training steps of the teacher."""
    batch_size: int | None = None
    """Sentences in a batch."""
    learning_rate: float | None = None
    """The highest learning rate, after the warm-up."""
    teacher_layers: int | None = None
    """Layers of the teacher's encoder, and of its decoder."""
    teacher_features: int | None = None
    """Width of the teacher."""
    layers: int = 1
    """Layers of the student's encoder, and of its decoder."""
    features: int | None = None
    """Width of the student."""
    heads: int = 4
    """Heads of each attention, of both."""
    temperature: float = 2.0
    """Of the predictions, where logits are shown."""
    maps_weight: float = 1.0
    """The weight of the maps' divergence in the loss, where maps are shown."""
    train_size: int | None = None
    """Training sentences to make, the longer ones to be left out."""
    test_size: int | None = None
    """Test sentences to make, the longer ones to be left out."""
    cover: float | None = None
    """Share of the sentences to keep at least, the shortest ones."""

    study: ClassVar[str] = "distill"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "seeds": 1, "steps": 200, "teacher_steps": 240, "batch_size": 32, "teacher_layers": 1,
            "teacher_features": 64, "features": 32, "train_size": 2000, "test_size": 200,
            "cover": 0.3, "learning_rate": 1e-2,
        },
        "default": {
            "seeds": 1, "steps": 500, "teacher_steps": 600, "batch_size": 64, "teacher_layers": 2,
            "teacher_features": 128, "features": 32, "train_size": 4000, "test_size": 200,
            "cover": 0.5, "learning_rate": 5e-3,
        },
        "full": {
            "seeds": 3, "steps": 3000, "teacher_steps": 3000, "batch_size": 64, "teacher_layers": 2,
            "teacher_features": 128, "features": 32, "train_size": 20_000, "test_size": 600,
            "cover": 0.5, "learning_rate": 5e-3,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        for way in self.ways:
            check_choice("--ways", way, WAYS)
        if not self.ways or len(set(self.ways)) < len(self.ways):
            raise UsageError("--ways must name at least one, each once")
        for name in (
            "steps", "teacher_steps", "batch_size", "layers", "teacher_layers", "heads",
            "train_size", "test_size",
        ):  # fmt: skip
            check_positive(flag(name), getattr(self, name))
        for name in ("learning_rate", "maps_weight"):
            check_positive(flag(name), getattr(self, name), least=0)
        if not self.temperature > 0:
            raise UsageError(f"--temperature {self.temperature} must be positive")
        if self.cover is not None and not 0 < self.cover <= 1:
            raise UsageError(f"--cover {self.cover} must be above 0 and at most 1")
        if self.teacher_layers is not None and self.teacher_layers % self.layers:
            raise UsageError(
                f"--teacher-layers {self.teacher_layers} must be a multiple of --layers "
                f"{self.layers}"
            )
        for name in ("features", "teacher_features"):
            width = getattr(self, name)
            if width is not None and (width < 1 or width % (2 * self.heads)):
                raise UsageError(
                    f"{flag(name)} {width} must be an even multiple of --heads {self.heads}"
                )

    def run(self) -> Path:
        """Train the teachers and their students, and write the report."""
        from experiments.progress import Progress

        seeds = range(self.seeds or 1)
        each = (self.teacher_steps or 0) + len(self.ways) * (self.steps or 0)
        with RunFolder.open(self) as folder, Progress(len(seeds) * each) as progress:
            executables: dict[str, Any] = {}
            cells = [
                cell
                for seed in seeds
                for cell in _School(self, folder, progress, executables, seed).cells()
            ]
            return folder.conclude(_results(self, cells), build_report)


_TEACHER = "teacher"


class _School:
    """One seed's teacher and students.

    The teacher's checkpoint stays until the last student is done: a run that goes on takes the
    trained teacher from there.
    """

    def __init__(
        self, options: Distill, folder: RunFolder, progress: Any, executables: Any, seed: int
    ):
        self.options, self.folder, self.progress = options, folder, progress
        self.executables, self.seed = executables, seed
        self._data: Any = None
        self._taught: Any = None

    def cells(self) -> list[dict[str, Any]]:
        """Return the finished cells of the teacher and of each student."""
        options = self.options
        cells = [self._cell(_TEACHER, options.teacher_steps or 1, self._teacher_cell)]
        for way in options.ways:
            cells.append(self._cell(way, options.steps or 1, lambda way=way: self._student(way)))
            self.folder.drop_checkpoints(self._key(way))
        self.folder.drop_checkpoints(self._key(_TEACHER))
        return cells

    def _key(self, way: str) -> str:
        return f"{way.replace(' ', '-')}-seed{self.seed}"

    def _cell(self, way: str, steps: int, compute: Any) -> dict[str, Any]:
        if self.folder.has(self._key(way)):
            self.progress.skip(steps)
        return self.folder.cell(self._key(way), compute)

    def _corpus(self) -> Any:
        from experiments import translator

        if self._data is None:
            options = self.options
            self._data = translator.corpus(
                self.seed,
                batch_size=options.batch_size or 1,
                train_size=options.train_size or 1,
                test_size=options.test_size or 1,
                cover=options.cover or 1.0,
            )
        return self._data

    def _teach(self, way: str, layers: int, width: int, steps: int, **lesson: Any) -> Any:
        from experiments import translator
        from experiments.compiling import Executables
        from experiments.models import seq2seq

        data = self._corpus()
        size = seq2seq.Size(layers, self.options.heads, width, 2 * width)
        # Steps of one structure that learn by another loss are other steps.
        learns = "references" if way in ("none", "sequences") else way
        return translator.teach(
            translator.fresh(data, size),
            data,
            steps=steps,
            learning_rate=self.options.learning_rate or 0.0,
            checkpoints=self.folder.checkpoints(self._key(way)),
            progress=self.progress,
            name=f"{way}, seed {self.seed}",
            executables=self.executables.setdefault(learns, Executables()),
            **lesson,
        )

    def _teacher(self) -> Any:
        """Return the trained teacher and its history, from its checkpoint if it is there."""
        if self._taught is None:
            options = self.options
            width, steps = options.teacher_features or 1, options.teacher_steps or 1
            layers = options.teacher_layers or 1
            if self.folder.has(self._key(_TEACHER)):
                self.progress.skip(-steps)  # counted already; restoring counts them again
            self._taught = self._teach(_TEACHER, layers, width, steps)
        return self._taught

    def _teacher_cell(self) -> dict[str, Any]:
        return self._told(_TEACHER, *self._teacher())

    def _said(self) -> dict[int, list[int]]:
        """Return the teacher's translations of the training sentences."""
        from experiments import distilling

        def compute() -> dict[str, Any]:
            self.progress.say(f"seed {self.seed}: the teacher translates the training sentences")
            said = distilling.all_translations(self._teacher()[0], self._corpus())
            return {str(index): ids for index, ids in said.items()}

        found = self.folder.cell(f"translations-seed{self.seed}", compute)
        return {int(index): ids for index, ids in found.items()}

    def _student(self, way: str) -> dict[str, Any]:
        from experiments import distilling

        options = self.options
        loss, batch_at = distilling.lesson(
            way,
            self._corpus(),
            teacher=self._teacher()[0] if "logits" in way else None,
            said=self._said() if way == "sequences" else {},
            loss=distilling.Distillation(
                options.temperature,
                options.maps_weight,
                (options.teacher_layers or 1) // options.layers,
            ),
        )
        width, steps = options.features or 1, options.steps or 1
        taught = self._teach(way, options.layers, width, steps, loss=loss, batch_at=batch_at)
        return self._told(way, *taught)

    def _told(self, way: str, trained: Any, history: Any) -> dict[str, Any]:
        from experiments import translator

        kept = translator.told(trained, history)
        return {
            "way": way, "seed": self.seed, **kept, **translator.quality(trained, self._corpus()),
        }  # fmt: skip


def _results(options: Distill, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what results.json holds."""
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
    loss = _curve(results, folder, "valid_loss", "Held-out loss, nats")
    entropy = _curve(results, folder, "entropy", "Entropy of the attention / ln S")
    return report.Report(
        title="What a student learns from a teacher",
        answer=_answer(results),
        warnings=report.diverged(
            (f"{WORDS[m['way']]}, seed {m['seed']},", m["diverged_at"]) for m in results["models"]
        ),
        sections=[
            report.Section("After training", [how], [bleu, table]),
            report.Section("During training", [], [loss, entropy]),
            report.Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _curve(results: report.Results, folder: Path, name: str, words: str) -> report.Picture:
    series = report.runs(
        results["models"], "way", lambda m: report.observations(m, name), WORDS.__getitem__
    )
    return report.picture(
        folder, name, "curves", [("", series)], x="step", y=words,
        alt=f"{words} over the steps, by what is learnt from.",
        caption=f"{words} over the steps, mean and range over the seeds.",
    )  # fmt: skip


def _means(results: report.Results) -> dict[str, float]:
    """Return the mean BLEU of each way of learning, 0 where no seed has one."""
    return {way: report.mean(found["bleu"]) or 0.0 for way, found in results["summary"].items()}


def _learnt(results: report.Results) -> bool:
    """Return whether the best student can translate, so that students can be compared."""
    return max(v for way, v in _means(results).items() if way != "teacher") >= _LEARNT


def gains(results: report.Results) -> dict[str, float]:
    """Return the mean BLEU that each way of learning gains over the references alone."""
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
