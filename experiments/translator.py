"""Small translation models of the grammar, for studies that do something with a trained one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import metrics
from experiments.compiling import Executables
from experiments.data.text import TextSpec
from experiments.data.text_batches import TextBatches
from experiments.models import seq2seq as model
from experiments.progress import Progress
from experiments.train import History, Recipe, train

Loss = Callable[[Any, Any, Any], Any]
_OBSERVATIONS = 10


def corpus(
    seed: int, *, batch_size: int, train_size: int, test_size: int, cover: float = 0.5
) -> TextBatches:
    """Return English–German sentences of the grammar, all of one shape: the shorter ones.

    Args:
        seed: of the sentences.
        batch_size: sentences in a batch.
        train_size: training sentences to make.
        test_size: test sentences to make.
        cover: the share of them that is kept at least.
    """
    spec = TextSpec(
        train_size=train_size, test_size=test_size, keep_shortest=cover, batch_size=batch_size
    )
    return TextBatches.load(spec, seed)


def fresh(data: TextBatches, size: model.Size) -> model.Model:
    """Return an untrained Transformer with scaled dot products."""
    vocabularies = data.source.size, data.target.size
    return model.build("scaled_dot", size, *vocabularies, seed=data.seed, vary="cross")


def teach(
    untrained: model.Model,
    data: TextBatches,
    *,
    steps: int,
    learning_rate: float,
    checkpoints: Path,
    progress: Progress,
    name: str,
    executables: Executables,
    loss: Loss = model.loss,
    batch_at: Callable[[int], Any] | None = None,
) -> tuple[model.Model, History]:
    """Train a model and look at it some ten times; see `experiments.train.train`."""

    def plain(step: int) -> model.Arrays:
        return data.train[step].arrays

    batch_at = batch_at or plain
    sources = data.test[0].source
    return train(
        untrained,
        loss,
        batch_at,
        Recipe(
            steps=steps,
            learning_rate=learning_rate,
            warmup=min(200, max(1, steps // 5)),
            observe_every=max(1, steps // _OBSERVATIONS),
            checkpoint_every=max(100, steps // 5),
        ),
        seed=data.seed,
        observe=lambda trained: dict(look(trained, data.valid)),
        checkpoints=checkpoints,
        progress=progress,
        name=name,
        executables=executables,
        ahead=[batch_at(0)],
        besides=[
            lambda: model.prepare_observe(untrained, data.valid[0]),
            lambda: model.prepare_translate(untrained, sources, longest=_longest(data)),
        ],
    )  # fmt: skip


def _longest(data: TextBatches) -> int:
    return data.test[0].shape[1]


def look(trained: model.Model, batches: Sequence[model.Arrays]) -> dict[str, float]:
    """Return held-out loss a token, and the entropy of the attention to the source over ln S."""
    seen = [model.observe(trained, batch) for batch in batches]
    tokens = sum(float(s.tokens) for s in seen)
    return {
        name: sum(float(getattr(s, name)) * float(s.tokens) for s in seen) / tokens
        for name in ("valid_loss", "entropy")
    }


def translations(trained: model.Model, batches: Sequence[Any]) -> dict[int, list[int]]:
    """Return the greedy translation of each sentence of some batches, by its place in its split."""
    said = {}
    for batch in batches:
        ids = model.translate(trained, batch.source, longest=batch.shape[1])
        for row, index in enumerate(batch.index.tolist()):
            if index >= 0:
                said[index] = ids[row][ids[row] != model.PAD].tolist()
    return said


def quality(trained: model.Model, data: TextBatches) -> dict[str, float]:
    """Return held-out loss a token, and BLEU of the test sentences."""
    said = translations(trained, data.test)
    pairs = data.dataset.test
    spoken = [data.target.decode(said[i]) for i in range(len(pairs))]
    bleu = metrics.bleu(
        spoken, [pair.target for pair in pairs], tokenize=data.dataset.bleu_tokenize
    )
    return {"valid_loss": look(trained, data.valid)["valid_loss"], "bleu": bleu}


def told(trained: model.Model, history: History) -> dict[str, Any]:
    """Return what is kept of a trained model."""
    return {
        "parameters": model.parameters(trained),
        "observed": history.observed,
        "loss": history.loss,
        "gradient_norm": history.gradient_norm,
        "step_milliseconds": history.step_milliseconds(),
        "diverged_at": history.diverged_at,
    }


def joined(batches: Sequence[model.Arrays]) -> model.Arrays:
    """Return several batches of one shape as one."""
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
