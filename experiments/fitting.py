"""The exponent of a cost: least squares in log-log."""

import math
from collections.abc import Sequence

import numpy as np


def exponent(lengths: Sequence[int], costs: Sequence[float | None]) -> float | None:
    """Return p of the ``c · lengthᵖ`` that fits best, by least squares of the logarithms.

        p = Σ (x − x̄)(y − ȳ) / Σ (x − x̄)²,   x = ln length, y = ln cost

    Costs that are None, 0 or not finite have no logarithm and are ignored; None if fewer than two
    lengths remain.
    """
    points = [
        (math.log(n), math.log(cost))
        for n, cost in zip(lengths, costs, strict=True)
        if cost is not None and math.isfinite(cost) and cost > 0
    ]
    if len({x for x, _ in points}) < 2:
        return None
    x, y = np.array(points).T
    x = x - x.mean()
    return float(x @ (y - y.mean()) / (x @ x))
