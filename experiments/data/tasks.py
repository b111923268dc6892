"""Tasks made from a random generator: an input of symbols, and questions about it.

    recall     pairs (key, value), then keys, all different in the pairs: the value of each
    max        (priority, class) in any order: which class has the greatest priority
    listops    an expression such as [MAX 2 9 [MIN 4 7 ] 0 ]: its value
    copy       a list: the same list
    reverse    a list: from its end
    sort       a list: in order

A problem of length n has n inputs (pairs of symbols) and some answers. There are two layouts:

    bidirectional    inputs, then a slot for each answer; all answers are predicted at once
    causal           inputs, then the answers one after another, each predicted from those before

ListOps has MIN, MAX, MED (the median, rounded down) and SM (the sum modulo 10). Its answer depends
on far tokens through a tree, so a pattern that cuts the tree's edges shows.

References:
    Arora et al. 2023, "Zoology", arXiv 2312.04927 (recall).
    Chiang and Cholak 2022, arXiv 2202.12172; Nakanishi 2025, arXiv 2501.19399 (max and length).
    Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning", 1804.06028.
    Kazemnejad et al. 2023, arXiv 2305.19466 (copy, reverse, sort and length).
"""

import hashlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Batch = dict[str, Any]  # of arrays
Generator = np.random.Generator

WORDS = 64  # input symbols, and symbols that can be predicted
SLOT, PAD = WORDS, WORDS + 1  # further input symbols: an answer's slot, padding
SYMBOLS = WORDS + 2
UNSCORED = -1
HELD_OUT = 2**31  # the step whose problems are never trained on
_CLASSES = 10
_PRIORITIES = 16
_OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
# Digits are their own tokens; then the opening of each operator, then the one closing bracket.
LISTOPS_TOKENS = (*map(str, range(10)), *(f"[{name}" for name in _OPERATORS), "]")
_MOST_ARGUMENTS = 5


class Problems(NamedTuple):
    """Some problems of one length.

    Attributes:
        inputs: ``[B, n, 2]``; the second symbol is 0 for none.
        slots: ``[B, a]``, the first symbol of each answer's slot: the question, or `SLOT`.
        answers: ``[B, a]``.
    """

    inputs: np.ndarray
    slots: np.ndarray
    answers: np.ndarray


def generator(task: str, seed: int, step: int) -> Generator:
    """Return the generator of a step's problems: the same for all models of a seed."""
    number = int.from_bytes(hashlib.sha256(task.encode()).digest()[:4], "big")
    return np.random.default_rng([number, seed, step])


def recall(rng: Generator, *, size: int, pairs: int, queries: int, words: int) -> Batch:
    """Return ``size`` problems: keys and values ``[B, S]``, asked and answers ``[B, T]``."""
    keys = rng.permuted(np.tile(np.arange(words), (size, 1)), axis=1)[:, :pairs]
    values = rng.integers(words, size=(size, pairs))
    at = rng.integers(pairs, size=(size, queries))
    asked, answers = (np.take_along_axis(x, at, 1) for x in (keys, values))
    made = {"keys": keys, "values": values, "asked": asked, "answers": answers}
    return {name: array.astype(np.int32) for name, array in made.items()}


def expression(rng: Generator, length: int, depth: int) -> tuple[list[int], int]:
    """Return a ListOps expression of at most ``length`` tokens, and its value.

    Args:
        rng: of the choices.
        length: at least 4: an operator, two digits and a bracket.
        depth: the maximum nesting of operators, at least 1.
    """
    which = int(rng.integers(len(_OPERATORS)))
    left = length - 2
    tokens, values = [10 + which], []
    count = int(rng.integers(2, _MOST_ARGUMENTS + 1))
    for index in range(count):
        room = left - max(0, 1 - index)  # a second argument must still fit
        if room < 1:
            break
        if depth > 1 and room >= 4 and rng.random() < 0.6:
            inner, value = expression(rng, min(room, max(4, left // (count - index))), depth - 1)
        else:
            value = int(rng.integers(10))
            inner = [value]
        tokens += inner
        values.append(value)
        left -= len(inner)
    return [*tokens, len(LISTOPS_TOKENS) - 1], list(_OPERATORS.values())[which](values)


def _one_symbol(symbols: np.ndarray) -> np.ndarray:
    return np.stack([symbols, np.zeros_like(symbols)], axis=-1)


def _open(answers: np.ndarray) -> np.ndarray:
    return np.full_like(answers, SLOT)


def _recall(rng: Generator, size: int, length: int) -> Problems:
    queries, words = answers_of("recall", length), max(length, _CLASSES)
    made = recall(rng, size=size, pairs=length, queries=queries, words=words)
    classes = rng.integers(_CLASSES, size=(size, words))  # of each value: few different answers
    values, answers = (np.take_along_axis(classes, made[n], 1) for n in ("values", "answers"))
    return Problems(np.stack([made["keys"], values + 1], axis=-1), made["asked"], answers)


def _max(rng: Generator, size: int, length: int) -> Problems:
    greatest = rng.integers(1, _PRIORITIES, size=(size, 1))
    priorities = rng.integers(0, greatest, size=(size, length))
    at = rng.integers(length, size=(size, 1))
    np.put_along_axis(priorities, at, greatest, 1)
    classes = rng.integers(_CLASSES, size=(size, length))
    answers = np.take_along_axis(classes, at, 1)
    return Problems(np.stack([priorities, classes + 1], axis=-1), _open(answers), answers)


def _listops(rng: Generator, size: int, length: int) -> Problems:
    inputs, answers = np.full((size, length), PAD), np.empty((size, 1), np.int64)
    for row in range(size):
        tokens, answers[row] = expression(rng, length, depth=3)
        inputs[row, length - len(tokens) :] = tokens
    return Problems(_one_symbol(inputs), _open(answers), answers)


def _list(arranged: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Problems]:
    def make(rng: Generator, size: int, length: int) -> Problems:
        symbols = rng.integers(_CLASSES, size=(size, length))
        answers = arranged(symbols)
        return Problems(_one_symbol(symbols), _open(answers), answers)

    return make


TASKS: dict[str, Callable[[Generator, int, int], Problems]] = {
    "recall": _recall,
    "max": _max,
    "listops": _listops,
    "copy": _list(lambda x: x),
    "reverse": _list(lambda x: x[:, ::-1]),
    "sort": _list(lambda x: np.sort(x, axis=1)),
}
CHANCE = dict.fromkeys(TASKS, 1 / _CLASSES)  # accuracy of the best constant answer


def answers_of(task: str, length: int) -> int:
    """Return the number of answers of a problem of this length."""
    if task in ("max", "listops"):
        return 1
    return max(length // 3, 1) if task == "recall" else length


def longest(task: str, total: int) -> int:
    """Return the length of the longest problem that fits into ``total`` with its answers."""
    return max(n for n in range(1, total) if n + answers_of(task, n) <= total)


def bidirectional(problems: Problems, total: int) -> Batch:
    """Lay problems out for bidirectional attention: inputs, slots, padding up to ``total`` (T).

    Returns:
        ``symbols`` ``[B, T, 2]`` and ``targets`` ``[B, T]``, `UNSCORED` where nothing is predicted.
    """
    return _laid(problems, problems.slots, total)


def causal(problems: Problems, total: int) -> Batch:
    """Lay problems out for a causal model: inputs, a slot, and each answer after its prediction.

    Where the slots hold questions (recall), they stay; otherwise each holds the answer before it.
    """
    slots = problems.slots.copy()
    if (slots == SLOT).all():
        slots[:, 1:] = problems.answers[:, :-1]
    return _laid(problems, slots, total)


def _laid(problems: Problems, slots: np.ndarray, total: int) -> Batch:
    size, count = problems.answers.shape
    start = problems.inputs.shape[1]
    if start + count > total:
        raise ValueError(f"{start} inputs and {count} answers do not fit into length {total}")
    symbols = np.zeros((size, total, 2), np.int32)
    symbols[..., 0] = PAD
    symbols[:, :start] = problems.inputs
    symbols[:, start : start + count] = _one_symbol(slots)
    targets = np.full((size, total), UNSCORED, np.int32)
    targets[:, start : start + count] = problems.answers
    return {"symbols": symbols, "targets": targets}


def joined(batches: Sequence[Batch]) -> Batch:
    """Return several batches of one shape as one."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
