"""Translation models: data, training task, observation and scores."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments import metrics
from experiments.core.optim import Recipe
from experiments.core.train import History, Observed, Task
from experiments.data.batches import Batch
from experiments.data.text import TextSpec
from experiments.data.text_batches import TextBatches
from experiments.models import seq2seq as model
from experiments.models.seq2seq import PAD

SLACK = 4  # tokens that a translation may have beyond the longest reference


def grammar(
    seed: int, *, batch_size: int, train_size: int, test_size: int, keep_shortest: float = 0.5
) -> TextBatches:
    """Return English–German sentences of the grammar, the shorter ones, all of one shape.

    Args:
        seed: of the sentences.
        batch_size: sentences in a batch.
        train_size: training sentences to make.
        test_size: test sentences to make.
        keep_shortest: the share of them that is kept at least.
    """
    spec = TextSpec(
        train_size=train_size, test_size=test_size, keep_shortest=keep_shortest,
        batch_size=batch_size,
    )  # fmt: skip
    return TextBatches.load(spec, seed)


def fresh(text: TextBatches, size: model.Size) -> model.Model:
    """Return an untrained Transformer with scaled dot products."""
    vocabularies = text.source.size, text.target.size
    return model.build("scaled_dot", size, *vocabularies, seed=text.seed, score_in="cross")


def task(
    title: str,
    untrained: model.Model,
    text: TextBatches,
    *,
    loss: Any = model.loss,
    batch_at: Callable[[int], Any] | None = None,
    attends: bool = True,
    slack: int = 0,
) -> Task:
    """Return the task to translate a text, observed on its held-out sentences.

    Args:
        title: its name in the progress.
        untrained: the model.
        text: the sentences.
        loss: the training loss.
        batch_at: the batch of each step; by default the text's.
        attends: whether the model attends to the source, so that there is an entropy.
        slack: as of `translations`.
    """
    shapes = list({batch.shape: batch for batch in text.test}.values())
    looks = [*text.valid[:1], *(batch.arrays for batch in shapes)]
    return Task(
        title,
        untrained,
        loss,
        batch_at or (lambda step: text.train[step].arrays),
        text.seed,
        lambda trained: observe(trained, text.valid, attends=attends),
        ahead=[batch_at(0)] if batch_at else text.one_a_shape(),
        besides=[
            *(lambda m, b=b: model.prepare_observe(m, b) for b in looks),
            *(
                lambda m, b=b: model.prepare_translate(m, b.source, longest=b.shape[1] + slack)
                for b in shapes
            ),
        ],
        tokens=lambda batch: int(np.sum(batch["target_out"] != PAD)),
    )


def recipe(steps: int, learning_rate: float, **more: Any) -> Recipe:
    """Return how the studies train a translation model; ``more`` are fields of `Recipe`."""
    options = {"observations": 10, "warmup": min(200, max(1, steps // 5)), **more}
    return Recipe.short(steps, learning_rate, **options)


def observe(
    trained: model.Model, batches: Sequence[model.Arrays], *, attends: bool = True
) -> Observed:
    """Return held-out loss a token, and the entropy of the attention to the source over ln S."""
    seen = [model.observe(trained, batch) for batch in batches]
    weights = np.array([float(s.tokens) for s in seen])
    loss, entropy = (
        float(np.average([float(getattr(s, name)) for s in seen], weights=weights))
        for name in ("valid_loss", "entropy")
    )
    return {"valid_loss": loss, "entropy": entropy if attends else None}


def record(trained: model.Model, history: History) -> dict[str, Any]:
    """Return what is kept of a trained model."""
    return {"parameters": model.parameters(trained), **history.record()}


def translations(
    trained: model.Model, batches: Sequence[Batch], *, slack: int = 0
) -> dict[int, list[int]]:
    """Return the greedy translation of each sentence, as ids, by its index in its split.

    ``slack`` is how many more tokens it may have than the batch's targets.
    """
    found = {}
    for batch in batches:
        ids = model.translate(trained, batch.source, longest=batch.shape[1] + slack)
        for row, index in enumerate(batch.index.tolist()):
            if index >= 0:
                found[index] = ids[row][ids[row] != PAD].tolist()
    return found


def quality(trained: model.Model, text: TextBatches) -> dict[str, float | None]:
    """Return held-out loss a token, and BLEU of the test sentences."""
    ids = translations(trained, text.test)
    pairs = text.dataset.test
    bleu = metrics.bleu(
        [text.target.decode(ids[i]) for i in range(len(pairs))],
        [pair.target for pair in pairs],
        tokenize=text.dataset.bleu_tokenize,
    )
    return {"valid_loss": observe(trained, text.valid)["valid_loss"], "bleu": bleu}


def score(trained: model.Model, text: TextBatches, *, attends: bool) -> dict[str, Any]:
    """Translate the test split and return all scores, by length too, with examples."""
    data = text.dataset
    ids = translations(trained, text.test, slack=SLACK)
    translated = [text.target.decode(ids[i]) for i in range(len(data.test))]
    maps_of: list[Any] = [None] * len(data.test)
    shown = text.examples()
    pictures = {}
    for batch in text.test if attends else ():
        maps = np.asarray(model.observe(trained, batch.arrays).weights)
        for row, index in enumerate(batch.index.tolist()):
            if index < 0:
                continue
            t, s = int(batch.target_mask[row].sum()) - 1, int(batch.source_mask[row].sum()) - 1
            maps_of[index] = maps[row, :t, :s]
            if index in shown:
                pictures[index] = _picture(text, index, batch, row, maps[row])
    lengths = data.lengths("test")
    whole = list(range(len(data.test)))
    by_length = []
    for low, high in data.buckets:
        members = [i for i in whole if low <= lengths[i] <= high]
        if members:
            scores = _scores(text, translated, maps_of, members)
            by_length.append({"low": low, "high": min(high, max(lengths)), **scores})
    short = [i for i in whole if lengths[i] <= 20]
    return {
        **_scores(text, translated, maps_of, whole),
        "bleu_to_20": _scores(text, translated, maps_of, short)["bleu"] if short else None,
        "by_length": by_length,
        "translations": [
            {
                "source": data.display(data.test[i].source),
                "reference": data.display(data.test[i].target),
                "translation": data.display(translated[i]),
                "words": lengths[i],
            }
            for i in text.one_a_bucket()
        ],
        "attention": [pictures[i] for i in shown if i in pictures],
    }


def _scores(
    text: TextBatches, translated: list[str], maps_of: list[Any], members: list[int]
) -> dict[str, Any]:
    """Return BLEU, chrF and alignment error of some of the test sentences."""
    pairs = [text.dataset.test[i] for i in members]
    hypotheses, references = [translated[i] for i in members], [pair.target for pair in pairs]
    error = None
    if text.dataset.aligned and all(
        maps_of[i] is not None and np.isfinite(maps_of[i]).all() for i in members
    ):
        error = metrics.alignment_error([metrics.link_targets(maps_of[i]) for i in members], pairs)
    return {
        "sentences": len(members),
        "bleu": metrics.bleu(hypotheses, references, tokenize=text.dataset.bleu_tokenize),
        "chrf": metrics.chrf(hypotheses, references),
        "alignment_error": error,
    }


def _picture(
    text: TextBatches, index: int, batch: Batch, row: int, weights: np.ndarray
) -> dict[str, Any]:
    """Return what is needed to draw the attention over one sentence, its end included."""
    t, s = int(batch.target_mask[row].sum()), int(batch.source_mask[row].sum())
    pair = text.dataset.test[index]
    return {
        "source": [*text.source.labels(batch.source[row, : s - 1].tolist()), "⟨end⟩"],
        "target": [*text.target.labels(batch.target_out[row, : t - 1].tolist()), "⟨end⟩"],
        "gold": [list(link) for link in pair.alignment or ()],
        "weights": np.round(weights[:t, :s], 4).tolist(),
    }
