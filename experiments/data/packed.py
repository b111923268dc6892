"""Documents packed into rows for a language model: no padding, and a mask between documents.

    tokens      <bos> a b <eos> <bos> c d e        rows of one long stream, T tokens each
    segments    1     1 1 1     2     2 2 2        attention stays within a segment
    positions   0     1 2 3     0     1 2 3        from the start of the segment in its row
    targets     a     b <eos> · c     d e f        the next token of the document, · for none

The documents of an epoch are in an order that (seed, epoch) determines, so the batch of a step is a
function of (seed, step). Rows are made on demand: each process makes its rows.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.data.text import TextSpec, load
from experiments.data.tokens import BOS, EOS, PAD, Tokenizer, train_tokenizers
from experiments.errors import UsageError

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """One array ``[rows, T]`` of a batch; indexing it makes the requested rows."""

    shape: tuple[int, int]
    make: Callable[[np.ndarray], np.ndarray]

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        made = self.make(np.arange(self.shape[0])[first])
        return made[(slice(None), *rest)]


class Packed:
    """Documents as one stream, cut into rows.

    Args:
        documents: ids of each, without special ones.
        length: T.
        seed: of the order in each epoch; None keeps the order.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, seed: int | None = None):
        self._documents = [np.array([BOS, *ids, EOS], np.int32) for ids in documents]
        self.length, self.seed = length, seed
        self.tokens = sum(map(len, self._documents))
        self.rows = self.tokens // length
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def _stream(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and document numbers of an epoch, with one more at the end."""
        if self._epoch is None or self._epoch[0] != epoch:
            order = np.arange(len(self._documents))
            if self.seed is not None:
                order = np.random.default_rng([self.seed, epoch]).permutation(order)
            tokens = np.concatenate([*(self._documents[i] for i in order), [PAD]])
            lengths = [len(self._documents[i]) for i in order]
            numbers = np.append(np.repeat(np.arange(len(order)), lengths), len(order))
            self._epoch = epoch, tokens.astype(np.int32), numbers.astype(np.int32)
        return self._epoch[1:]

    def batch(self, step: int, size: int) -> Batch:
        """Return the batch of a step, of ``size`` rows; each array is a `Rows`."""

        def pick(name: str) -> Callable[[np.ndarray], np.ndarray]:
            return lambda index: np.stack([self._row(step * size + i)[name] for i in index])

        shape = size, self.length
        return {n: Rows(shape, pick(n)) for n in ("tokens", "segments", "positions", "targets")}

    def _row(self, index: int) -> dict[str, np.ndarray]:
        epoch, at = divmod(index, self.rows)
        tokens, numbers = self._stream(epoch)
        begin, end = at * self.length, (at + 1) * self.length
        own = numbers[begin : end + 1]
        starts = np.flatnonzero(np.diff(own[:-1], prepend=own[0] - 1))
        segments = own[:-1] - own[0] + 1
        positions = np.arange(self.length, dtype=np.int32) - starts[segments - 1]
        targets = np.where(own[1:] == own[:-1], tokens[begin + 1 : end + 1], PAD)
        found = {"tokens": tokens[begin:end], "segments": segments, "positions": positions}
        return {name: x.astype(np.int32) for name, x in {**found, "targets": targets}.items()}

    def batches(self, size: int) -> list[Batch]:
        """Return all rows once, as arrays; the last batch begins earlier, so as to be full."""
        size = min(size, self.rows)
        return [
            {name: rows[:] for name, rows in self.batch(at, size).items()}
            for at in range(self.rows // size)
        ]


@dataclasses.dataclass(frozen=True)
class Documents:
    """Text for a language model with one seed: training rows, and held-out rows.

    Attributes:
        tokenizer: of the text.
        train: the training rows.
        valid: held out, to observe.
        test: held out, to score.
        facts: the data's entry in results.json.
        digest: of the whole text.
    """

    tokenizer: Tokenizer
    train: Packed
    valid: Packed
    test: Packed
    facts: dict[str, Any]
    digest: str

    @classmethod
    def load(cls, spec: TextSpec, seed: int, length: int) -> "Documents":
        """Return the source side of a text, or the lines of a file, each a document."""
        data = load(spec, seed)
        tokenizer, _ = train_tokenizers(data, size=spec.pieces)
        packed = {}
        for split in ("train", "valid", "test"):
            ids = [tokenizer.encode(pair.source) for pair in getattr(data, split)]
            packed[split] = Packed(ids, length, seed if split == "train" else None)
            if not packed[split].rows:
                raise UsageError(
                    f"--data {spec.data}: the split {split!r} has {packed[split].tokens} tokens, "
                    f"too few for --length {length}"
                )
        facts = {
            "name": data.name,
            "language": data.source_language,
            "documents": {split: len(getattr(data, split)) for split in packed},
            "tokens": {split: part.tokens for split, part in packed.items()},
            "unit": data.unit,
            "vocabulary": tokenizer.size,
            "provenance": data.provenance,
        }
        return cls(tokenizer, **packed, facts=facts, digest=data.digest)
