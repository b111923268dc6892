"""Tasks that separate ways to look, made from a key: what is told, and what is asked about it.

    recall     pairs (key, value), then keys, all different in the pairs: the value of each
    max        (priority, class) in any order: which class has the greatest priority
    listops    an expression: its value
    copy       a list: say it again
    reverse    a list: say it backwards
    sort       a list: say it in order

A problem of length n is ``told`` (n pairs of symbols), and answers with what stands at the place of
each. It is laid out in one of two ways:

    asking     told, a slot for each answer (all at once, looking both ways)
    telling    told, then the answers one after another (each sees those before it)

References:
    Arora et al. 2023, "Zoology", arXiv 2312.04927 (recall).
    Chiang and Cholak 2022, arXiv 2202.12172; Nakanishi 2025, arXiv 2501.19399 (max and length).
    Kazemnejad et al. 2023, arXiv 2305.19466 (copy, reverse, sort and length).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments import listops, recall

Batch = dict[str, np.ndarray]

WORDS = 64  # symbols that can be told, or said
SLOT, PAD = WORDS, WORDS + 1  # further symbols of the first place: an answer's slot, nothing
SYMBOLS = WORDS + 2
UNSCORED = -1
_CLASSES = 10
_PRIORITIES = 16


class Problems(NamedTuple):
    """Some problems of one length.

    Attributes:
        told: ``[B, n, 2]``; the second symbol is 0 for none.
        slots: ``[B, a]``, the first symbol of each answer's slot: what is asked, or `SLOT`.
        answers: ``[B, a]``.
    """

    told: np.ndarray
    slots: np.ndarray
    answers: np.ndarray


def _one_symbol(symbols: np.ndarray) -> np.ndarray:
    return np.stack([symbols, np.zeros_like(symbols)], axis=-1)


def _open(answers: np.ndarray) -> np.ndarray:
    return np.full_like(answers, SLOT)


def _recall(rng: np.random.Generator, size: int, length: int) -> Problems:
    queries, words = answers_of("recall", length), max(length, _CLASSES)
    made = recall.batch(rng, size=size, pairs=length, queries=queries, words=words)
    classes = rng.integers(_CLASSES, size=(size, words))  # of each value, so that few are said
    values, answers = (np.take_along_axis(classes, made[n], 1) for n in ("values", "answers"))
    return Problems(np.stack([made["keys"], values + 1], axis=-1), made["asked"], answers)


def _max(rng: np.random.Generator, size: int, length: int) -> Problems:
    greatest = rng.integers(1, _PRIORITIES, size=(size, 1))
    priorities = rng.integers(0, greatest, size=(size, length))
    at = rng.integers(length, size=(size, 1))
    np.put_along_axis(priorities, at, greatest, 1)
    classes = rng.integers(_CLASSES, size=(size, length))
    answers = np.take_along_axis(classes, at, 1)
    return Problems(np.stack([priorities, classes + 1], axis=-1), _open(answers), answers)


def _listops(rng: np.random.Generator, size: int, length: int) -> Problems:
    told, answers = np.full((size, length), PAD), np.empty((size, 1), np.int64)
    for row in range(size):
        tokens, answers[row] = listops.expression(rng, length, depth=3)
        told[row, length - len(tokens) :] = tokens
    return Problems(_one_symbol(told), _open(answers), answers)


def _list(arranged: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Problems]:
    def make(rng: np.random.Generator, size: int, length: int) -> Problems:
        symbols = rng.integers(_CLASSES, size=(size, length))
        answers = arranged(symbols)
        return Problems(_one_symbol(symbols), _open(answers), answers)

    return make


TASKS: dict[str, Callable[[np.random.Generator, int, int], Problems]] = {
    "recall": _recall,
    "max": _max,
    "listops": _listops,
    "copy": _list(lambda x: x),
    "reverse": _list(lambda x: x[:, ::-1]),
    "sort": _list(lambda x: np.sort(x, axis=1)),
}
# What an answer drawn blindly is right in, at the best.
CHANCE = dict.fromkeys(TASKS, 1 / _CLASSES)
LEAST = {"listops": 4, "max": 1}  # the least length, 1 for the others


def answers_of(task: str, length: int) -> int:
    """Return how many answers a problem of this length has."""
    if task in ("max", "listops"):
        return 1
    return max(length // 3, 1) if task == "recall" else length


def longest(task: str, room: int) -> int:
    """Return the length of the longest problem that fits into ``room`` places with its answers."""
    return max(n for n in range(1, room) if n + answers_of(task, n) <= room)


def asking(problems: Problems, places: int) -> Batch:
    """Lay problems out for a model that looks both ways: told, then slots, then padding.

    Args:
        problems: what to lay out.
        places: how many places there are, T.

    Returns:
        ``symbols`` ``[B, T, 2]`` and ``targets`` ``[B, T]``, `UNSCORED` where nothing is asked.
    """
    return _laid(problems, _one_symbol(problems.slots), problems.told.shape[1], places)


def telling(problems: Problems, places: int) -> Batch:
    """Lay problems out for a causal model: told, a slot, and each answer after its place.

    The slots hold what is asked where something is (recall); otherwise the answer before.
    """
    said = problems.slots.copy()
    if (said == SLOT).all():
        said[:, 1:] = problems.answers[:, :-1]
    return _laid(problems, _one_symbol(said), problems.told.shape[1], places)


def _laid(problems: Problems, slots: np.ndarray, start: int, places: int) -> Batch:
    size, count = problems.answers.shape
    if start + count > places:
        raise ValueError(f"{start} told and {count} answers do not fit into {places} places")
    symbols = np.zeros((size, places, 2), np.int32)
    symbols[..., 0] = PAD
    symbols[:, :start] = problems.told
    symbols[:, start : start + count] = slots
    targets = np.full((size, places), UNSCORED, np.int32)
    targets[:, start : start + count] = problems.answers
    return {"symbols": symbols, "targets": targets}


def joined(batches: list[Batch]) -> Batch:
    """Return several batches of one shape as one."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
