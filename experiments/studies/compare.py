"""The effect of the decoder's attention to the source on translation: the main study."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions, check_heads
from experiments.errors import UsageError

if TYPE_CHECKING:
    from experiments.data.text import TextSpec

# As experiments.models.seq2seq.MECHANISMS, which would load JAX.
SCORES = ("none", "dot", "scaled_dot", "additive", "general", "concat", "cosine")


@dataclasses.dataclass(frozen=True)
class Compare(TrainingOptions):
    """How do no attention, dot, scaled dot and additive attention differ in translating?

    The same encoder-decoder is trained with each in its attention to the source; its self-attention
    is the scaled dot product in all of them (--score-in all changes that too). With --model gru it
    is recurrent, as where additive attention was invented. BLEU, chrF, alignment error, all by
    sentence length; loss, entropy of the attention, step time, memory of the compiled step.

    Beside it: Bahdanau et al. 2014 (arXiv 1409.0473) Figure 2, Britz et al. 2017 (1703.03906),
    Luong et al. 2015 (1508.04025).

    Command: python -m experiments compare. Takes 4 minutes on two cores; quick 40 s, full 40
    minutes.
    Expected: with attention BLEU stays above 80 up to 20 words; without, it falls with the length.
    """

    data: str = "grammar"
    """grammar (made on the spot), a .tsv or .tsv.gz, two plain files SOURCE,TARGET, or
    hf:NAME[:CONFIG][@REVISION]."""
    languages: str | None = None
    """SOURCE-TARGET codes, as in en-de, if the data does not name them."""
    scores: tuple[str, ...] = ("none", "dot", "scaled_dot", "additive")
    """Attention to the source: none, dot, scaled_dot, additive, general, concat, cosine."""
    model: str = "transformer"
    """transformer, or gru: recurrent, with Bahdanau's attention for additive and Luong's for every
    other score."""
    location: str = "global"
    """Attention of a gru: global, or local-p: near a predicted position."""
    score_in: str = "cross"
    """cross: only the attention to the source differs; all: self-attention has the score too."""
    layers: int = FROM_PRESET
    """Layers of the encoder, and of the decoder."""
    heads: int = FROM_PRESET
    """Heads of each attention."""
    features: int = FROM_PRESET
    """Width of the model, half that of its feed-forward part; a head has this over --heads."""
    dropout: float = 0.0
    """Dropout rate in training."""
    train_size: int = FROM_PRESET
    """Training sentences to make or use at most."""
    test_size: int = FROM_PRESET
    """Test sentences to make or use at most."""
    max_length: int = 80
    """Longest sentence to train on, in tokens; longer test sentences are cut."""
    keep_shortest: float = FROM_PRESET
    """Share of the training sentences to train on, the shortest ones."""
    pieces: int = FROM_PRESET
    """Size of the sentencepiece vocabularies, for real text."""
    shapes: int = FROM_PRESET
    """Number of batch shapes (1 to 4); each is compiled once."""
    test_longer: bool | None = None
    """Test on sentences longer than any trained on, too."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""

    study: ClassVar[str] = "compare"
    defaults: ClassVar = {"learning_rate": 0.005}
    choices: ClassVar = {
        "model": ("transformer", "gru"), "location": ("global", "local-p"), "scores": SCORES,
        "score_in": ("cross", "all"),
    }  # fmt: skip
    intervals: ClassVar = {
        "max_length": "[4, inf)", "pieces": "[40, inf)", "keep_shortest": "(0, 1]",
        "dropout": "[0, 1)", "shapes": "[1, 4]",
    }  # fmt: skip
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "seeds": 1, "steps": 180, "batch_size": 32, "layers": 1, "heads": 4, "features": 64,
            "train_size": 4000, "test_size": 140, "pieces": 1000, "shapes": 1, "keep_shortest": 0.5,
            "test_longer": False,
        },
        "default": {
            "seeds": 1, "steps": 900, "batch_size": 64, "layers": 1, "heads": 4, "features": 96,
            "train_size": 20_000, "test_size": 280, "pieces": 4000, "shapes": 2,
            "keep_shortest": 1.0, "test_longer": True,
        },
        "full": {
            "seeds": 3, "steps": 4000, "batch_size": 64, "layers": 2, "heads": 4, "features": 128,
            "train_size": 60_000, "test_size": 1400, "pieces": 8000, "shapes": 3,
            "keep_shortest": 1.0, "test_longer": True,
        },
    }  # fmt: skip

    def resolved(self) -> Self:
        """Return the options with the preset filled in; a gru has one head, as in the articles."""
        one = {"heads": 1} if self.model == "gru" and self.heads is None else {}
        return super(Compare, dataclasses.replace(self, **one)).resolved()

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        if self.model == "transformer" and self.location != "global":
            raise UsageError(f"--location {self.location} needs --model gru")
        if self.model == "gru" and self.score_in != "cross":
            raise UsageError(
                f"--score-in {self.score_in} needs --model transformer: a gru has no more"
            )
        check_heads("--features", self.features, self.heads)

    def text(self) -> "TextSpec":
        """Return the specification of the text."""
        from experiments.data.text import TextSpec

        return TextSpec(
            self.data, self.languages, self.train_size, test_size=self.test_size,
            pieces=self.pieces, max_length=self.max_length, keep_shortest=self.keep_shortest,
            test_longer=bool(self.test_longer), batch_size=self.batch_size, shapes=self.shapes,
        )  # fmt: skip

    def run(self) -> Path:
        """Load the data, train and score every model, write the report."""
        from experiments.data.text_batches import TextBatches
        from experiments.studies.compare_report import build_report

        # The data comes first: if it cannot be used, no folder is made.
        corpora = {0: TextBatches.load(self.text(), 0)}
        cells: list[dict[str, Any]] = []
        total = self.seeds * len(self.scores) * self.steps
        with RunFolder.open(self, total, corpora[0].dataset.digest) as run:
            facts = run.cell("data", lambda: corpora[0].facts())
            run.progress.say(f"data: {facts['summary']}")
            run.progress.say(f"writing to {run.path}")
            for seed, score in itertools.product(range(self.seeds), self.scores):
                key = f"{score}-seed{seed}"
                if not run.has(key) and seed not in corpora:
                    corpora = {seed: TextBatches.load(self.text(), seed)}
                    run.check_data(corpora[seed].dataset.digest)
                work = functools.partial(_train, self, run, key, score, corpora.get(seed))
                cells.append(run.trained(key, self.steps, work))
                run.progress.say(_line(cells[-1]))
                run.write_results(_results(self, facts, cells), finished=False)
            return run.conclude(_results(self, facts, cells), build_report)


def _train(options: Compare, run: RunFolder, key: str, score: str, text: Any) -> dict[str, Any]:
    from experiments import translation
    from experiments.models import seq2seq

    begun, attends, width = time.monotonic(), score != "none", options.features
    size = seq2seq.Size(options.layers, options.heads, width, 2 * width, options.dropout)
    fresh = seq2seq.build(
        score, size, text.source.size, text.target.size, seed=text.seed, score_in=options.score_in,
        kind=options.model, location=options.location,
    )  # fmt: skip
    title, slack = f"{score}, seed {text.seed}", translation.SLACK
    task = translation.task(title, fresh, text, attends=attends, slack=slack)
    more = {"observations": 12, "checkpoint_every": options.checkpoint_every}
    recipe = translation.recipe(options.steps, options.learning_rate, **more)
    trained, history = run.train(key, task, recipe)
    middle = time.monotonic()
    test = translation.score(trained, text, attends=attends)
    return {
        "score": score,
        "seed": text.seed,
        "parameters": seq2seq.parameters(trained),
        "train": history.record(),
        "test": test,
        "seconds": {"training": middle - begun, "scoring": time.monotonic() - middle},
    }


def _results(
    options: Compare, facts: Mapping[str, Any], cells: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the study's part of results.json."""
    summary: dict[str, Any] = {}
    for score in options.scores:
        own = [c for c in cells if c["score"] == score]
        if not own:
            continue
        summary[score] = {
            "seeds": [c["seed"] for c in own],
            **{
                m: [c["test"][m] for c in own]
                for m in ("bleu", "bleu_to_20", "chrf", "alignment_error")
            },
            "by_length": [
                {
                    "low": bucket["low"],
                    "high": bucket["high"],
                    "sentences": bucket["sentences"],
                    **{
                        m: [c["test"]["by_length"][i][m] for c in own]
                        for m in ("bleu", "chrf", "alignment_error")
                    },
                }
                for i, bucket in enumerate(own[0]["test"]["by_length"])
            ],
            "valid_loss": [c["train"]["observed"][-1]["valid_loss"] for c in own],
            "entropy": [c["train"]["observed"][-1]["entropy"] for c in own],
            "step_milliseconds": [c["train"]["step_milliseconds"] for c in own],
            "temporaries": [max(c["train"]["temporaries"].values(), default=None) for c in own],
            "parameters": own[0]["parameters"],
            "diverged_at": [c["train"]["diverged_at"] for c in own],
        }
    return {"data": facts, "summary": summary, "models": cells}


def _line(cell: Mapping[str, Any]) -> str:
    test = cell["test"]
    if cell["train"]["diverged_at"] is not None:
        return f"{cell['score']}, seed {cell['seed']}: diverged at {cell['train']['diverged_at']}"
    return (
        f"{cell['score']}, seed {cell['seed']}: BLEU {test['bleu']:.1f}, chrF {test['chrf']:.1f}, "
        f"{cell['train']['step_milliseconds']:.0f} ms a step"
    )
