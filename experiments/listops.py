"""ListOps: nested expressions over digits, such as ``[MAX 2 9 [MIN 4 7 ] 0 ]``, which is 9.

    MIN, MAX    the least, the greatest argument
    MED         the median, rounded down
    SM          the sum modulo 10

The answer depends on far tokens through a tree, so a pattern that cuts the tree's edges shows.

References:
    Nangia and Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning",
    arXiv 1804.06028.
    Tay et al. 2020, "Long Range Arena", arXiv 2011.04006, §2.2 (lengths up to 2,000).
"""

import statistics
from collections.abc import Callable, Sequence

import numpy as np

OPERATORS: dict[str, Callable[[Sequence[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}
# Digits are their own tokens; then the opening of each operator, then the one closing bracket.
TOKENS = (*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
_CLOSE = len(TOKENS) - 1
_MOST = 5  # arguments


def expression(rng: np.random.Generator, length: int, depth: int) -> tuple[list[int], int]:
    """Return an expression of at most ``length`` tokens, and its value.

    Args:
        rng: where the choices come from.
        length: at least 4: an operator, two digits and a bracket.
        depth: how deep operators may nest, at least 1.
    """
    which = int(rng.integers(len(OPERATORS)))
    left = length - 2
    tokens, values = [10 + which], []
    count = int(rng.integers(2, _MOST + 1))
    for index in range(count):
        reserved = max(0, 1 - index)  # a second argument must still fit
        room = left - reserved
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
    return [*tokens, _CLOSE], list(OPERATORS.values())[which](values)


def written(tokens: Sequence[int]) -> str:
    """Return an expression as people write it."""
    return " ".join(TOKENS[token] for token in tokens)
