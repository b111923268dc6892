"""One translation model from data to scores: what a cell of the compare study computes."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import metrics
from experiments.compiling import Executables
from experiments.data.batches import Batch
from experiments.data.text_batches import TextBatches
from experiments.models import seq2seq as model
from experiments.progress import Progress
from experiments.train import History, Recipe, train

if TYPE_CHECKING:
    from experiments.studies.compare import Compare

_OBSERVATIONS = 12


def train_and_score(
    options: "Compare",
    mechanism: str,
    corpus: TextBatches,
    checkpoints: Path,
    progress: Progress,
    executables: Executables,
) -> dict[str, Any]:
    """Train one model and return everything that is reported of it.

    Args:
        options: the study's settings.
        mechanism: how the decoder looks at the source.
        corpus: the data of this seed.
        checkpoints: where training states go, and come from after a stop.
        progress: where to show loss and time left.
        executables: compiled steps of the models before, by structure and shape.
    """
    begun = time.monotonic()
    fresh = model.build(
        mechanism,
        model.Size(
            options.layers, options.heads, options.features, 2 * options.features, options.dropout
        ),
        corpus.source.size,
        corpus.target.size,
        seed=corpus.seed,
        vary=options.vary,
        kind=options.model,
        location=options.location,
    )
    trained, history = train(
        fresh,
        model.loss,
        lambda step: corpus.train[step].arrays,
        Recipe(
            steps=options.steps,
            learning_rate=options.learning_rate,
            warmup=min(200, max(1, options.steps // 5)),
            observe_every=max(1, options.steps // _OBSERVATIONS),
            checkpoint_every=options.checkpoint_every,
        ),
        seed=corpus.seed,
        observe=lambda m: _look(m, corpus.valid, attends=mechanism != "none"),
        checkpoints=checkpoints,
        progress=progress,
        name=f"{mechanism}, seed {corpus.seed}",
        executables=executables,
        ahead=corpus.one_a_shape(),
        besides=_preparations(fresh, corpus),
    )
    middle = time.monotonic()
    test = _score(trained, corpus, attends=mechanism != "none")
    return {
        "score": mechanism,
        "seed": corpus.seed,
        "parameters": model.parameters(trained),
        "train": _told(history),
        "test": test,
        "seconds": {"training": middle - begun, "scoring": time.monotonic() - middle},
    }


def _preparations(fresh: model.Model, corpus: TextBatches) -> list[Callable[[], None]]:
    """Return what there is to compile for looking at the model and for translating with it."""
    one = {batch.shape: batch for batch in corpus.test}
    batches = [*corpus.valid[:1], *(batch.arrays for batch in one.values())]
    looks = [lambda b=b: model.prepare_observe(fresh, b) for b in batches]
    return looks + [
        lambda b=b: model.prepare_translate(fresh, b.source, longest=_longest(b))
        for b in one.values()
    ]


def _longest(batch: Batch) -> int:
    """Return the most tokens a translation may have: a few more than the longest reference."""
    return batch.shape[1] + 4


def _look(
    trained: model.Model, batches: Sequence[model.Arrays], *, attends: bool
) -> dict[str, float | None]:
    """Return held-out loss a token and the mean entropy of the attention to the source."""
    seen = [model.observe(trained, batch) for batch in batches]
    tokens = sum(float(s.tokens) for s in seen)
    means = {
        name: sum(float(getattr(s, name)) * float(s.tokens) for s in seen) / tokens
        for name in ("valid_loss", "entropy")
    }
    return {"valid_loss": means["valid_loss"], "entropy": means["entropy"] if attends else None}


def _told(history: History) -> dict[str, Any]:
    """Return the history as results.json has it: curves thinned to means of some 200 stretches."""
    stretch = max(1, history.step // 200)

    def thin(values: list[float]) -> list[list[float]]:
        starts = range(0, len(values), stretch)
        parts = [values[i : i + stretch] for i in starts]
        return [[i + len(p), statistics.fmean(p)] for i, p in zip(starts, parts, strict=True)]

    return {
        "steps": history.step,
        "loss": thin(history.loss),
        "gradient_norm": thin(history.gradient_norm),
        "observed": history.observed,
        "step_milliseconds": history.step_milliseconds(),
        "compile_seconds": history.compile_seconds,
        "temporaries": history.temporaries,
        "diverged_at": history.diverged_at,
    }


def _score(trained: model.Model, corpus: TextBatches, *, attends: bool) -> dict[str, Any]:
    """Translate the test split and return all scores, by length too, with examples."""
    data = corpus.dataset
    said = [""] * len(data.test)
    looked: list[Any] = [None] * len(data.test)
    shown = corpus.examples()
    pictures = {}
    for batch in corpus.test:
        ids = model.translate(trained, batch.source, longest=_longest(batch))
        maps = np.asarray(model.observe(trained, batch.arrays).weights) if attends else None
        for row, index in enumerate(batch.index):
            if index < 0:
                continue
            said[index] = corpus.target.decode(ids[row].tolist())
            if maps is None:
                continue
            t, s = int(batch.target_mask[row].sum()) - 1, int(batch.source_mask[row].sum()) - 1
            looked[index] = maps[row, :t, :s]
            if index in shown:
                pictures[int(index)] = _picture(corpus, int(index), batch, row, maps[row])
    lengths = data.lengths("test")
    whole = list(range(len(data.test)))
    by_length = []
    for low, high in data.buckets:
        members = [i for i in whole if low <= lengths[i] <= high]
        if members:
            scores = _scores(corpus, said, looked, members)
            by_length.append({"low": low, "high": min(high, max(lengths)), **scores})
    short = [i for i in whole if lengths[i] <= 20]
    return {
        **_scores(corpus, said, looked, whole),
        "bleu_to_20": _scores(corpus, said, looked, short)["bleu"] if short else None,
        "by_length": by_length,
        "translations": [
            {
                "source": data.display(data.test[i].source),
                "reference": data.display(data.test[i].target),
                "translation": data.display(said[i]),
                "words": lengths[i],
            }
            for i in corpus.one_a_bucket()
        ],
        "attention": [pictures[i] for i in shown if i in pictures],
    }


def _scores(
    corpus: TextBatches, said: list[str], looked: list[Any], members: list[int]
) -> dict[str, Any]:
    """Return BLEU, chrF and alignment error of some of the test sentences."""
    pairs = [corpus.dataset.test[i] for i in members]
    hypotheses, references = [said[i] for i in members], [pair.target for pair in pairs]
    error = None
    if corpus.dataset.aligned and all(
        looked[i] is not None and np.isfinite(looked[i]).all() for i in members
    ):
        error = metrics.alignment_error([metrics.link_targets(looked[i]) for i in members], pairs)
    return {
        "sentences": len(members),
        "bleu": metrics.bleu(hypotheses, references, tokenize=corpus.dataset.bleu_tokenize),
        "chrf": metrics.chrf(hypotheses, references),
        "alignment_error": error,
    }


def _picture(
    corpus: TextBatches, index: int, batch: Batch, row: int, weights: np.ndarray
) -> dict[str, Any]:
    """Return what is needed to draw the attention over one sentence, its end included."""
    t, s = int(batch.target_mask[row].sum()), int(batch.source_mask[row].sum())
    pair = corpus.dataset.test[index]
    return {
        "source": [*corpus.source.labels(batch.source[row, : s - 1].tolist()), "⟨end⟩"],
        "target": [*corpus.target.labels(batch.target_out[row, : t - 1].tolist()), "⟨end⟩"],
        "gold": [list(link) for link in pair.alignment or ()],
        "weights": np.round(weights[:t, :s], 4).tolist(),
    }
