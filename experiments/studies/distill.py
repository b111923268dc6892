"""What a small student gains from a larger teacher, by what it is shown."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_choice, check_positive, flag
from experiments.errors import UsageError

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
        from experiments.reports.distill import build

        seeds = range(self.seeds or 1)
        each = (self.teacher_steps or 0) + len(self.ways) * (self.steps or 0)
        with RunFolder.open(self) as folder, Progress(len(seeds) * each) as progress:
            executables: dict[str, Any] = {}
            cells = [
                cell
                for seed in seeds
                for cell in _School(self, folder, progress, executables, seed).cells()
            ]
            return folder.conclude(_results(self, cells), build)


_QUESTION = (
    "A small model learns to translate from references, which name one word at each place. A "
    "larger one that has learnt already could tell more: how likely every other word is, where it "
    "looked, or simpler sentences to learn from. What is each worth?"
)
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
    return {"question": _QUESTION, "summary": summary, "models": cells}
