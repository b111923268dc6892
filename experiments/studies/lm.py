"""A language model on text, by the score of its attention; the study of the trainer itself."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions, check_heads
from experiments.report import blocks as report

SCORES = ("dot", "scaled_dot", "additive", "general", "concat", "cosine")
SCHEDULES = ("cosine", "inverse-sqrt", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Lm(TrainingOptions):
    """How well does a language model predict text, by the score of its attention?

    A decoder-only Transformer is trained on documents packed into rows, with a mask between them.
    Perplexity on documents that are held out, loss over the steps, samples. It trains on a mesh
    (--mesh data=4,model=2), in several processes, in float32, bfloat16 or float16.

    Beside it: Radford et al. 2018 (Improving Language Understanding by Generative Pre-Training),
    Vaswani et al. 2017 (arXiv 1706.03762) §3.2.1 and §5.3.

    Command: python -m experiments lm. Takes 3 minutes on two cores; quick 40 s, full 40 minutes.
    Expected: scaled dot and additive attention end at about the same perplexity.
    """

    data: str = "grammar"
    """grammar (made on the spot), a .tsv or .tsv.gz, whose first column is read, a plain file with
    a document in each line, or hf:NAME[:CONFIG][@REVISION]."""
    scores: tuple[str, ...] = ("scaled_dot", "additive")
    """Scores of the self-attention: dot, scaled_dot, additive, general, concat, cosine."""
    length: int = FROM_PRESET
    """Tokens in a row (T)."""
    warmup: int | None = None
    """Steps of the warm-up; a tenth of all when not given."""
    schedule: str = "cosine"
    """After the warm-up: cosine, inverse-sqrt or constant."""
    weight_decay: float = 0.0
    """Decoupled decay of the weights that are matrices."""
    clip: float = 1.0
    """The largest gradient norm."""
    label_smoothing: float = 0.0
    """Share of each target's probability that is spread over the vocabulary."""
    precision: str = "float32"
    """float32, bfloat16 or float16; parameters are float32 in all."""
    layers: int = FROM_PRESET
    """Layers of the model."""
    heads: int = 4
    """Heads of each attention."""
    features: int = FROM_PRESET
    """Width of the model, a quarter of that of its feed-forward part."""
    dropout: float = 0.0
    """Dropout rate in training."""
    train_size: int = FROM_PRESET
    """Training documents to make or use at most."""
    pieces: int = FROM_PRESET
    """Size of the sentencepiece vocabulary, for real text."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    observe_every: int | None = None
    """Steps between two observations of held-out documents; a twelfth of all when not given."""
    fetch_every: int = 10
    """Steps whose metrics are fetched together."""

    study: ClassVar[str] = "lm"
    defaults: ClassVar = {"learning_rate": 0.003}
    choices: ClassVar = {"scores": SCORES, "schedule": SCHEDULES, "precision": PRECISIONS}
    intervals: ClassVar = {
        "pieces": "[40, inf)", "dropout": "[0, 1)", "label_smoothing": "[0, 1)",
        "warmup": "[0, inf)",
    }  # fmt: skip
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "seeds": 1, "steps": 120, "batch_size": 16, "length": 64, "layers": 1, "features": 64,
            "train_size": 4000, "pieces": 1000,
        },
        "default": {
            "seeds": 1, "steps": 600, "batch_size": 32, "length": 128, "layers": 2, "features": 96,
            "train_size": 20_000, "pieces": 4000,
        },
        "full": {
            "seeds": 3, "steps": 4000, "batch_size": 32, "length": 256, "layers": 4,
            "features": 128, "train_size": 200_000, "pieces": 8000,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        check_heads("--features", self.features, self.heads)

    def run(self) -> Path:
        """Load the text, train and score a model with each score, write the report."""
        from experiments.data.packed import Documents
        from experiments.data.text import TextSpec

        data = self.data
        if not data.endswith((".tsv", ".tsv.gz")) and Path(data).is_file():
            data = f"{data},{data}"  # the lines of one file on both sides
        spec = TextSpec(data, train_size=self.train_size, pieces=self.pieces)
        load = functools.cache(lambda seed: Documents.load(spec, seed, self.length))
        facts = load(0).facts
        models = {
            f"{score}-seed{seed}": (score, seed, load)
            for seed, score in itertools.product(range(self.seeds), self.scores)
        }
        with RunFolder.open(self, len(models) * self.steps, load(0).digest) as run:
            results = _results(facts, run.all_trained(models, _train))
            return run.conclude(results, build_report)


def _train(
    options: Lm, run: RunFolder, key: str, score: str, seed: int, load: Any
) -> dict[str, Any]:
    from flax import nnx

    from attention_jax.nnx import TransformerLM
    from experiments.core.optim import Recipe
    from experiments.models import language
    from experiments.models.seq2seq import parameters

    text, width, steps = load(seed), options.features, options.steps
    run.check_data(text.digest)
    model = TransformerLM(
        options.layers, options.heads, width, 4 * width, text.tokenizer.size, score=score,
        positions="rotary", dropout_rate=options.dropout, rngs=nnx.Rngs(seed),
    )  # fmt: skip
    sizes = {"batch_size": options.batch_size, "smoothing": options.label_smoothing}
    task = language.task(f"{score}, seed {seed}", model, text, seed=seed, **sizes)
    own = ("schedule", "weight_decay", "clip", "precision", "checkpoint_every", "fetch_every")
    recipe = Recipe.short(
        steps, options.learning_rate, observations=1,
        warmup=max(1, steps // 10) if options.warmup is None else options.warmup,
        observe_every=options.observe_every or max(1, steps // 12),
        **{name: getattr(options, name) for name in own},
    )  # fmt: skip
    trained, history = run.train(key, task, recipe)
    loss = language.observe(trained, text.test.batches(options.batch_size))["valid_loss"]
    made = language.samples(trained, seed, count=4, longest=min(48, options.length))
    return {
        "score": score,
        "seed": seed,
        "parameters": parameters(trained),
        "test_loss": loss,
        "perplexity": language.perplexity(loss),
        "samples": [text.tokenizer.decode(ids) for ids in made],
        **history.record(),
    }


def _results(facts: Mapping[str, Any], cells: list[Any]) -> dict[str, Any]:
    own = report.runs(cells, "score", lambda cell: cell)
    summary = {
        score: {
            "perplexity": [c["perplexity"] for c in models],
            "test_loss": [c["test_loss"] for c in models],
            "step_milliseconds": [c["step_milliseconds"] for c in models],
            "parameters": models[0]["parameters"],
        }
        for score, models in own.items()
    }
    return {"data": facts, "summary": summary, "models": cells}


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings, data, summary = results["settings"], results["data"], results["summary"]
    rows = [
        [
            report.label(score),
            report.mean_sd(row["perplexity"], 2),
            report.mean_sd(row["test_loss"], 3),
            report.mean_sd(row["step_milliseconds"], 0),
            f"{row['parameters']:,}",
        ]
        for score, row in summary.items()
    ]
    columns = ["score", "perplexity", "loss, nats a token", "ms a step", "parameters"]
    table = report.Table(f"Held-out documents ({report.seeds(results)})", columns, rows)
    how = (
        f"{data['documents']['train']:,} documents, {data['tokens']['train']:,} tokens "
        f"({data['unit']}s, {data['vocabulary']:,} in the vocabulary), packed into rows of "
        f"{settings['length']}; {settings['layers']} layers, width {settings['features']}, "
        f"{settings['heads']} heads, rotary positions; {settings['steps']:,} steps of "
        f"{settings['batch_size']} rows in {settings['precision']}."
    )
    words = {"loss": "Loss in training, nats a token", "valid_loss": "Held-out loss, nats a token"}
    curves = [
        report.training(folder, results["models"], name, text, line=lambda m: m["score"])
        for name, text in words.items()
    ]
    texts = [
        [f"{report.label(m['score'])}, seed {m['seed']}", text]
        for m in results["models"]
        for text in m["samples"]
    ]
    means = {score: report.mean(row["perplexity"]) for score, row in summary.items()}
    best = report.listed(means, ".2f", best=min, words=report.label)
    return report.Report(
        title="A language model",
        answer=[f"Perplexity on held-out documents, best first: {best}." if best else None],
        warnings=report.diverged(
            (f"{report.label(m['score'])}, seed {m['seed']},", m["diverged_at"])
            for m in results["models"]
        ),
        sections=[
            report.Section("Held-out documents", [how], [table, *curves]),
            report.Section(
                "Samples",
                ["Drawn token by token from the likeliest 90 %."],
                [report.Table("Samples", ["model", "text"], texts, prose=True)],
            ),
            report.Section("Data", [data["provenance"]]),
        ],
    )
