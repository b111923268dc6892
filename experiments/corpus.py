"""Parallel text made ready for one seed: vocabularies, batches of a few shapes, examples."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import model
from experiments.data import (
    Batch,
    DataError,
    Dataset,
    Pair,
    Tokenizer,
    TrainBatches,
    choose_shapes,
    encode,
    eval_batches,
    load,
    train_tokenizers,
)

if TYPE_CHECKING:
    from experiments.studies.compare import Compare

_VALID_SIZE = 256
_LOOK_SIZE = 64  # sentences in a batch that is only looked at
_EXAMPLE_LENGTHS = ((7, 10), (11, 15))


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Data ready for training and scoring with one seed."""

    seed: int
    dataset: Dataset
    source: Tokenizer
    target: Tokenizer
    train: TrainBatches
    valid: tuple[model.Arrays, ...]
    test: tuple[Batch, ...]
    left_out: Mapping[str, int]
    lengths: Mapping[str, tuple[int, ...]]

    @classmethod
    def load(cls, options: "Compare", seed: int) -> "Corpus":
        """Load what ``--data`` names, make the vocabularies from its train split, and encode."""
        dataset = _load(options, seed)
        source, target = train_tokenizers(dataset, size=options.pieces)
        learn = encode(dataset.train, source, target, max_length=options.max_length)
        most = min(options.max_length, _covering(learn.lengths.max(1), options.cover or 1.0))
        learn = encode(dataset.train, source, target, max_length=most)
        watch = encode(dataset.valid, source, target, max_length=most)
        shapes = choose_shapes(np.concatenate([learn.lengths, watch.lengths]), options.shapes)
        dropped = 0
        if not options.beyond:
            dataset, dropped = _within(dataset, source, target, shapes[-1])
        test = encode(dataset.test, source, target, max_length=options.max_length, truncate=True)
        # Two shapes at most, the first one that of training: each is compiled for every model.
        longest = np.maximum(test.lengths.max(0), shapes[-1])
        both = dict.fromkeys([shapes[-1], tuple(int(-(-n // 4) * 4) for n in longest)])
        return cls(
            seed=seed,
            dataset=dataset,
            source=source,
            target=target,
            train=TrainBatches(learn, batch_size=options.batch_size, seed=seed, shapes=shapes),
            valid=tuple(
                model.arrays(b)
                for b in eval_batches(watch, batch_size=_LOOK_SIZE, shapes=shapes[-1:])
            ),
            test=tuple(eval_batches(test, batch_size=_LOOK_SIZE, shapes=tuple(both))),
            left_out={"train": learn.left_out, "valid": watch.left_out, "test": dropped},
            lengths={
                "train": tuple(dataset.length(dataset.train[i].source) for i in learn.index),
                "valid": tuple(dataset.length(dataset.valid[i].source) for i in watch.index),
                "test": tuple(dataset.lengths("test")),
            },
        )

    def ahead(self) -> list[model.Arrays]:
        """Return one training batch of each shape."""
        found: dict[Any, model.Arrays] = {}
        step = 0
        while len(found) < len(self.train.shapes) and step < self.train.per_epoch:
            batch = self.train[step]
            found.setdefault(batch.shape, model.arrays(batch))
            step += 1
        return list(found.values())

    def facts(self) -> dict[str, Any]:
        """Return what results.json tells of the data."""
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
            "length_unit": "characters" if data.unit == "character" else "words",
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
            pool = [i for i, n in enumerate(lengths) if low <= n <= high and i not in chosen]
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


def _load(options: "Compare", seed: int) -> Dataset:
    """Return the text that ``--data`` names; what is wrong with it is told with the option."""
    try:
        return load(
            options.data,
            seed=seed,
            train_size=options.train_size,
            valid_size=_VALID_SIZE,
            test_size=options.test_size,
            languages=options.languages,
        )
    except DataError as error:
        said = str(error)
        if not said.startswith((options.data, "languages ")):
            said = f"{options.data}: {said}"
        raise DataError(f"{'--' if said.startswith('languages ') else '--data '}{said}") from error


def _covering(lengths: np.ndarray, share: float) -> int:
    """Return the length, a multiple of 4, that holds at least this share of the sentences."""
    return int(-(-np.quantile(lengths, share, method="higher") // 4) * 4)


def _within(
    dataset: Dataset, source: Tokenizer, target: Tokenizer, shape: tuple[int, int]
) -> tuple[Dataset, int]:
    """Return the data with test sentences no longer than what is trained on, and how many go."""
    kept = tuple(
        pair
        for pair in dataset.test
        if len(source.encode(pair.source)) < shape[0] and len(target.encode(pair.target)) < shape[1]
    )
    # If nothing is left, Dataset says that the split is empty.
    return dataclasses.replace(dataset, test=kept), len(dataset.test) - len(kept)


def _crossings(pair: Pair) -> int:
    """Return how many pairs of gold links cross: how much the sentence is reordered."""
    links = pair.alignment or ()
    return sum((s - u) * (t - v) < 0 for s, t in links for u, v in links)
