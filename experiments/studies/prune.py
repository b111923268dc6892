"""How many heads a translation model can lose, and whether it matters which."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_positive, flag
from experiments.errors import UsageError

PARTS = ("self", "cross")
ORDERS = ("importance", "random")


@dataclasses.dataclass(frozen=True)
class Prune(StudyOptions):
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

    steps: int | None = None
    """Training steps of the model."""
    batch_size: int | None = None
    """Sentences in a batch."""
    learning_rate: float = 5e-3
    """The highest learning rate, after the warm-up."""
    layers: int | None = None
    """Layers of the encoder, and of the decoder."""
    heads: int | None = None
    """Heads of each attention, two or more."""
    features: int | None = None
    """Width of the model, half that of its feed-forward part; a head has this over --heads."""
    train_size: int | None = None
    """Training sentences to make."""
    test_size: int | None = None
    """Test sentences to make; the longer half is left out."""
    points: int | None = None
    """Numbers of removed heads to measure at, beside none."""
    draws: int | None = None
    """Random orders of each seed."""

    study: ClassVar[str] = "prune"
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
        for name in (
            "steps", "batch_size", "layers", "features", "train_size", "test_size", "points",
            "draws",
        ):  # fmt: skip
            check_positive(flag(name), getattr(self, name))
        check_positive("--heads", self.heads, least=2)
        check_positive("--learning-rate", self.learning_rate, least=0)
        if self.features and self.heads and self.features % (2 * self.heads):
            raise UsageError(
                f"--features {self.features} must be an even multiple of --heads {self.heads}"
            )

    def run(self) -> Path:
        """Train, take heads away, and write the report."""
        from experiments.compiling import Executables
        from experiments.progress import Progress
        from experiments.reports.prune import build

        seeds, steps = range(self.seeds or 1), self.steps or 1
        with RunFolder.open(self) as folder, Progress(len(seeds) * steps) as progress:
            executables = Executables()
            cells = []
            for seed in seeds:
                key = f"seed{seed}"
                if folder.has(key):
                    progress.skip(steps)
                work = (self, folder, progress, executables, key, seed)
                cells.append(folder.cell(key, lambda work=work: _train(*work)))
                folder.drop_checkpoints(key)
            return folder.conclude(_results(self, cells), build)


_QUESTION = (
    "Attention has many heads. Does a trained translation model need them all: how many can go, "
    "does it matter which, and is it the attention of the sentences to themselves or the "
    "decoder's attention to the source that bears it?"
)


def _train(
    options: Prune, folder: RunFolder, progress: Any, executables: Any, key: str, seed: int
) -> dict[str, Any]:
    from experiments import heads, translator
    from experiments.models import seq2seq

    data = translator.corpus(
        seed,
        batch_size=options.batch_size or 1,
        train_size=options.train_size or 1,
        test_size=options.test_size or 1,
    )
    width = options.features or 1
    size = seq2seq.Size(options.layers or 1, options.heads or 1, width, 2 * width)
    trained, history = translator.teach(
        translator.fresh(data, size),
        data,
        steps=options.steps or 1,
        learning_rate=options.learning_rate,
        checkpoints=folder.checkpoints(key),
        progress=progress,
        name=f"seed {seed}",
        executables=executables,
    )
    progress.say(f"seed {seed}: trained; taking heads away")
    worth = heads.importance(trained, data)
    counts = {"points": options.points or 1, "draws": options.draws or 1}
    return {
        "seed": seed,
        **translator.told(trained, history),
        "importance": worth,
        "curves": heads.curves(trained, data, worth, **counts),
        "pruned": [heads.pruned(trained, data, worth, part) for part in PARTS],
    }


def _results(options: Prune, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what results.json holds."""
    parts: dict[str, Any] = {}
    for part in PARTS:
        own = [point for cell in cells for point in cell["curves"] if point["part"] == part]
        removed = sorted({point["removed"] for point in own})
        worth = cells[0]["importance"]
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
    return {"question": _QUESTION, "parts": parts, "models": cells}
