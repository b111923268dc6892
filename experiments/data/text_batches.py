"""Parallel text ready for one seed: vocabularies, batches of a few shapes, examples."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.data.batches import (
    Arrays,
    Batch,
    TrainBatches,
    choose_shapes,
    encode,
    eval_batches,
)
from experiments.data.grammar import Pair
from experiments.data.text import Dataset, TextSpec, load
from experiments.data.tokens import Tokenizer, train_tokenizers

_EVAL_SIZE = 64  # sentences in a batch that is not trained on
_EXAMPLE_LENGTHS = ((7, 10), (11, 15))


@dataclasses.dataclass(frozen=True)
class TextBatches:
    """Text to train on and to score with one seed.

    Attributes:
        seed: of the training sentences and of their order.
        dataset: the text.
        source: the tokenizer of the source side.
        target: the tokenizer of the target side.
        train: the training batches.
        valid: the arrays of the held-out batches.
        test: the test batches.
        left_out: how many sentences of each split were too long.
        lengths: the source lengths of the sentences that are used, by split.
    """

    seed: int
    dataset: Dataset
    source: Tokenizer
    target: Tokenizer
    train: TrainBatches
    valid: tuple[Arrays, ...]
    test: tuple[Batch, ...]
    left_out: Mapping[str, int]
    lengths: Mapping[str, tuple[int, ...]]

    @classmethod
    def load(cls, spec: TextSpec, seed: int) -> "TextBatches":
        """Load the text, make the vocabularies from its train split, and encode it."""
        dataset = load(spec, seed)
        source, target = train_tokenizers(dataset, size=spec.pieces)
        name = f"--data {spec.data}, split"
        learn = encode(
            dataset.train, source, target, max_length=spec.max_length, name=f"{name} train"
        )
        # The length, a multiple of 4, that holds at least the share of sentences to keep.
        shortest = np.quantile(learn.lengths.max(1), spec.keep_shortest, method="higher")
        longest = min(spec.max_length, int(-(-shortest // 4) * 4))
        learn = encode(dataset.train, source, target, max_length=longest)
        held_out = encode(dataset.valid, source, target, max_length=longest, name=f"{name} valid")
        shapes = choose_shapes(np.concatenate([learn.lengths, held_out.lengths]), spec.shapes)
        dropped = 0
        if not spec.test_longer:
            dataset, dropped = _within(dataset, source, target, shapes[-1])
        test = encode(dataset.test, source, target, max_length=spec.max_length, truncate=True)
        # Two shapes at most, the first one that of training: each is compiled for every model.
        rounded = -(-np.maximum(test.lengths.max(0), shapes[-1]) // 4) * 4
        both = dict.fromkeys([shapes[-1], (int(rounded[0]), int(rounded[1]))])
        valid = eval_batches(held_out, batch_size=_EVAL_SIZE, shapes=shapes[-1:])
        return cls(
            seed=seed,
            dataset=dataset,
            source=source,
            target=target,
            train=TrainBatches(learn, batch_size=spec.batch_size, seed=seed, shapes=shapes),
            valid=tuple(batch.arrays for batch in valid),
            test=tuple(eval_batches(test, batch_size=_EVAL_SIZE, shapes=tuple(both))),
            left_out={"train": learn.left_out, "valid": held_out.left_out, "test": dropped},
            lengths={
                "train": tuple(dataset.length(dataset.train[i].source) for i in learn.index),
                "valid": tuple(dataset.length(dataset.valid[i].source) for i in held_out.index),
                "test": tuple(dataset.lengths("test")),
            },
        )

    def one_a_shape(self) -> list[Arrays]:
        """Return one training batch of each shape."""
        found: dict[Any, Arrays] = {}
        for step in range(self.train.per_epoch):
            batch = self.train[step]
            found.setdefault(batch.shape, batch.arrays)
            if len(found) == len(self.train.shapes):
                break
        return list(found.values())

    def facts(self) -> dict[str, Any]:
        """Return what results.json holds of the data."""
        data = self.dataset
        sizes = {split: len(lengths) for split, lengths in self.lengths.items()}
        return {
            "name": data.name,
            "summary": f"{data.name}, {data.source_language} to {data.target_language}, "
            f"{sizes['train']:,} training and {sizes['test']:,} test sentences",
            "source_language": data.source_language,
            "target_language": data.target_language,
            "sentences": sizes,
            "left_out_as_too_long": dict(self.left_out),
            "unit": data.unit,
            "length_unit": "words",
            "vocabulary": {"source": self.source.size, "target": self.target.size},
            "lengths": {split: [min(n), max(n)] for split, n in self.lengths.items()},
            "longest_trained": max(self.lengths["train"]),
            "batch_shapes": [list(shape) for shape in self.train.shapes],
            "aligned": data.aligned,
            "bleu_tokenize": data.bleu_tokenize,
            "provenance": data.provenance,
        }

    def examples(self) -> list[int]:
        """Return the test sentences to show: middling lengths, the most reordered where known."""
        lengths = self.dataset.lengths("test")
        chosen: list[int] = []
        for low, high in _EXAMPLE_LENGTHS:
            pool = [i for i, n in enumerate(lengths) if low <= n <= high]
            if pool:
                chosen.append(max(pool, key=lambda i: (_crossings(self.dataset.test[i]), -i)))
        return chosen or list(range(min(2, len(lengths))))

    def one_a_bucket(self) -> list[int]:
        """Return the first test sentence of each range of lengths."""
        lengths = self.dataset.lengths("test")
        firsts = (
            next((i for i, n in enumerate(lengths) if low <= n <= high), None)
            for low, high in self.dataset.buckets
        )
        return [i for i in firsts if i is not None]


def _within(
    dataset: Dataset, source: Tokenizer, target: Tokenizer, shape: tuple[int, int]
) -> tuple[Dataset, int]:
    """Return the data with test sentences no longer than what is trained on, and how many go."""
    kept = tuple(
        pair
        for pair in dataset.test
        if len(source.encode(pair.source)) < shape[0] and len(target.encode(pair.target)) < shape[1]
    )
    # If nothing is left, Dataset raises that the split is empty.
    return dataclasses.replace(dataset, test=kept), len(dataset.test) - len(kept)


def _crossings(pair: Pair) -> int:
    """Return how many pairs of gold links cross: how much the sentence is reordered."""
    links = pair.alignment or ()
    return sum((s - u) * (t - v) < 0 for s, t in links for u, v in links)
