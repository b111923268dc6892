"""Batches of a few fixed shapes, in an order that a step number determines.

Under jit every new shape is compiled anew, so the pairs are sorted into at most ``max_shapes``
shapes (source length, target length), chosen to waste the least padding. Within an epoch the order
is a function of (seed, epoch), and every epoch has the same number of batches, so step ``i`` can be
computed without the previous steps: a resumed run has the batches of an uninterrupted one.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from experiments.data.grammar import Pair
from experiments.data.tokens import BOS, EOS, PAD, Tokenizer
from experiments.errors import UsageError

Shape = tuple[int, int]
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Pairs as ids.

    Attributes:
        source: Ids of each source, with ``EOS`` at the end.
        target: Ids of each target, with ``EOS`` at the end and no ``BOS``.
        index: The index of each pair in its split.
        left_out: The number of pairs that were too long.
    """

    source: tuple[np.ndarray, ...]
    target: tuple[np.ndarray, ...]
    index: tuple[int, ...]
    left_out: int

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> np.ndarray:
        """[pairs, 2]: source and target length, ``EOS`` included."""
        return np.array([[len(s), len(t)] for s, t in zip(self.source, self.target, strict=True)])


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch, NumPy arrays of int32 and bool; B rows, source length S, target length T.

    Attributes:
        source: [B, S] ids, ``EOS`` behind the text, then padding.
        target_in: [B, T] the decoder's input: ``BOS`` and the text.
        target_out: [B, T] its targets: the text and ``EOS``, each predicted from ``target_in`` up
            to the same position.
        source_mask: [B, S], True where there is a token (``EOS`` included).
        target_mask: [B, T], True where ``target_out`` counts.
        index: [B] the pair's number in its split, -1 for an empty row that fills the batch up.
    """

    source: np.ndarray
    target_in: np.ndarray
    target_out: np.ndarray
    source_mask: np.ndarray
    target_mask: np.ndarray
    index: np.ndarray

    @property
    def shape(self) -> Shape:
        """(S, T)."""
        return self.source.shape[1], self.target_in.shape[1]

    @property
    def arrays(self) -> Arrays:
        """The arguments of a model and its loss."""
        return {"source": self.source, "target_in": self.target_in, "target_out": self.target_out}


def encode(
    pairs: Sequence[Pair],
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    name: str = "the data",
) -> Encoded:
    """Encode pairs, leaving out those with more than ``max_length`` tokens on a side.

    ``EOS`` counts. With ``truncate`` they are cut instead, so that a test split keeps its size.
    ``name`` is the name of the pairs in errors.
    """
    sources, targets, index = [], [], []
    for number, pair in enumerate(pairs):
        ids = [*source.encode(pair.source), EOS], [*target.encode(pair.target), EOS]
        if max_length is not None and max(map(len, ids)) > max_length:
            if not truncate:
                continue
            ids = [
                side if len(side) <= max_length else [*side[: max_length - 1], EOS] for side in ids
            ]
        for side, kept in zip(ids, (sources, targets), strict=True):
            kept.append(np.array(side, np.int32))
        index.append(number)
    if not sources:
        raise UsageError(
            f"{name}: all {len(pairs)} pairs are longer than {max_length} tokens; train on longer "
            "ones with --max-length"
        )
    return Encoded(tuple(sources), tuple(targets), tuple(index), len(pairs) - len(sources))


def choose_shapes(lengths: np.ndarray, max_shapes: int, *, multiple: int = 4) -> tuple[Shape, ...]:
    """At most ``max_shapes`` rising shapes that hold all ``lengths`` with the least padding.

    Args:
        lengths: [pairs, 2] source and target lengths.
        max_shapes: How many shapes, 1 to 4.
        multiple: Shapes are rounded up to it.

    Returns:
        (S, T) pairs, each at least as large as the one before on both sides.
    """
    if not 1 <= max_shapes <= 4:
        raise ValueError(f"max_shapes must be 1 to 4, not {max_shapes}")
    rounded = -(-lengths // multiple) * multiple
    order = np.argsort(rounded.sum(1), kind="stable")
    largest = np.maximum.accumulate(rounded[order], axis=0)  # the shape that holds the first i + 1
    total = len(largest)
    cuts = sorted({int(total * q / 16) for q in range(1, 16)} - {0})
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    for count in range(max_shapes):
        for chosen in itertools.combinations(cuts, count):
            ends = np.array([*chosen, total])
            rows = np.diff(ends, prepend=0)
            area = float((rows * largest[ends - 1].sum(1)).sum())
            if area < best[0]:
                best = area, (*chosen, total)
    shapes = [tuple(int(n) for n in largest[end - 1]) for end in best[1]]
    return tuple(dict.fromkeys(shapes))  # type: ignore[arg-type]


def _assign(lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """[pairs]: the first shape that holds each pair."""
    fits = (lengths[:, None, :] <= np.array(shapes)[None]).all(-1)
    if not fits.any(-1).all():
        worst = lengths[~fits.any(-1)][0].tolist()
        raise ValueError(f"lengths {worst} (source, target) fit none of the shapes {tuple(shapes)}")
    return fits.argmax(1)


def _pack(data: Encoded, rows: Sequence[int], shape: Shape, batch_size: int) -> Batch:
    s, t = shape
    source = np.full((batch_size, s), PAD, np.int32)
    target_in = np.full((batch_size, t), PAD, np.int32)
    target_out = np.full((batch_size, t), PAD, np.int32)
    index = np.full(batch_size, -1, np.int32)
    for i, row in enumerate(rows):
        source[i, : len(data.source[row])] = data.source[row]
        ids = data.target[row]
        target_out[i, : len(ids)] = ids
        target_in[i, 0] = BOS
        target_in[i, 1 : len(ids)] = ids[:-1]
        index[i] = data.index[row]
    return Batch(source, target_in, target_out, source != PAD, target_out != PAD, index)


class TrainBatches:
    """Endless training batches of ``batch_size`` full rows; ``batches[i]`` is step i's.

    Pairs left over in one shape move up to the next larger one; only the last, largest batch of an
    epoch is filled by repeating pairs. Nothing is dropped.

    Args:
        data: The encoded train split.
        batch_size: Rows of every batch.
        seed: With the epoch, decides the order.
        max_shapes: At most so many (S, T) shapes, 1 to 4.
        shapes: The shapes, if they are given.
    """

    def __init__(
        self,
        data: Encoded,
        *,
        batch_size: int,
        seed: int,
        max_shapes: int = 3,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        lengths = data.lengths
        self.shapes = tuple(shapes) if shapes else choose_shapes(lengths, max_shapes)
        self._members = [
            np.flatnonzero(_assign(lengths, self.shapes) == i) for i in range(len(self.shapes))
        ]
        self._plan: tuple[int, list[tuple[Shape, np.ndarray]]] | None = None
        self.per_epoch = -(-len(data) // batch_size)

    def _epoch(self, epoch: int) -> list[tuple[Shape, np.ndarray]]:
        """Shape and rows of each batch of an epoch."""
        if self._plan is not None and self._plan[0] == epoch:
            return self._plan[1]
        rng = np.random.default_rng([self.seed, epoch])
        batches = []
        rest = np.empty(0, np.int64)
        for shape, members in zip(self.shapes, self._members, strict=True):
            rows = np.concatenate([rest, rng.permutation(members)])
            full = len(rows) // self.batch_size * self.batch_size
            batches += [(shape, chunk) for chunk in rows[:full].reshape(-1, self.batch_size)]
            rest = rows[full:]
        if len(rest):
            filling = rng.choice(len(self.data), self.batch_size - len(rest))
            batches.append((self.shapes[-1], np.concatenate([rest, filling])))
        batches = [batches[i] for i in rng.permutation(len(batches))]
        self._plan = epoch, batches
        return batches

    def __getitem__(self, step: int) -> Batch:
        epoch, place = divmod(step, self.per_epoch)
        shape, rows = self._epoch(epoch)[place]
        return _pack(self.data, rows.tolist(), shape, self.batch_size)


def eval_batches(
    data: Encoded, *, batch_size: int, max_shapes: int = 3, shapes: Sequence[Shape] | None = None
) -> list[Batch]:
    """Every pair once, short ones first.

    The last batch of each shape is filled up with empty rows, whose index is -1.
    """
    lengths = data.lengths
    chosen = tuple(shapes) if shapes else choose_shapes(lengths, max_shapes)
    assigned = _assign(lengths, chosen)
    result = []
    for number, shape in enumerate(chosen):
        members = np.flatnonzero(assigned == number)
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size].tolist()
            result.append(_pack(data, rows, shape, batch_size))
    return result
