"""What one attention did in one call, row by row; and the same in a few numbers for each head."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax._core.record import Record, static


class Facts(NamedTuple):
    """What is known of a call without looking at a number.

    Attributes:
        kind: the module's class, or "attend" where no module was said to call.
        order: which call it was, counted from 0.
        score: the score, written as it was made.
        mask: the mask, or None.
        scale: the factor on the dot product where the score is one, else None.
        depth: H, the query's depth.
        dtype: the query's dtype.
        implementation: the kernel that runs this call without `capture`.
        batch_axes: how many axes `*B` has.
        keys: S.
    """

    kind: str
    order: int
    score: str
    mask: str | None
    scale: float | None
    depth: int
    dtype: str
    implementation: str
    batch_axes: int
    keys: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Reading(Record):
    """What one attention did; rows are `[*B, N, T]`, before dropout, float32 at least.

    A row that sees nothing has 0 everywhere. What costs more is None unless it was asked for.

    Attributes:
        entropy: `-Σ p ln p`, in nats.
        relative_entropy: the entropy over ln of the number of visible keys; 0 where that is 1.
        largest_weight: `max_s p`.
        first_share: the weight on the key of index 0.
        self_share: the weight on keys at the query's own position.
        ahead_share: the weight on keys at later positions than the query's.
        padding_share: the weight on keys that are not real; None where nothing says which are.
        mean_key: `Σ p s / (S - 1)`, where it looks on average, 0 the first key and 1 the last.
        visible: how many keys the row may see.
        max_logit: the largest visible logit.
        logit_range: the largest minus the least visible logit.
        jacobian_norm: Frobenius norm of the softmax's derivative, `diag(p) - p pᵀ`.
        out_norm: length of the head's output.
        out_weight: norm of each head's part of the output projection, `[N]`; None without one.
        largest: the greatest absolute finite entry of query, key, value and out, `[4]`.
        bad: how many positions of query, key, value and out are not finite, `[4]`.
        counted: bool `[*B, N, T]`, the queries that are real; None where nothing says.
        similarity: `[*B, N, N]`, cosines of the heads' maps once an even spread is taken away.
        weights: `[*B, N, T, S]`.
        mean_map: `[*B, T, S]`, the mean over heads.
        facts: what is known without looking at a number.
    """

    entropy: Any
    relative_entropy: Any
    largest_weight: Any
    first_share: Any
    self_share: Any
    ahead_share: Any
    padding_share: Any
    mean_key: Any
    visible: Any
    max_logit: Any
    logit_range: Any
    jacobian_norm: Any
    out_norm: Any
    out_weight: Any
    largest: Any
    bad: Any
    counted: Any
    similarity: Any
    weights: Any
    mean_map: Any
    facts: Facts = static()

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "reading", {"kind": self.facts.kind, "entropy": self.entropy}

    @property
    def num_heads(self) -> int:
        """N."""
        return int(self.entropy.shape[-2])

    def per_head(self, name: str, *, least_visible: int = 1) -> np.ndarray:
        """The mean of a row quantity over examples and queries, `[N]`.

        Rows count that see at least `least_visible` keys and belong to real queries; a head none of
        whose rows count is NaN.
        """
        rows = np.asarray(getattr(self, name), np.float64)
        counts = self.rows(least_visible)
        axes = tuple(i for i in range(rows.ndim) if i != rows.ndim - 2)
        total = counts.sum(axes)
        summed = np.where(counts, rows, 0).sum(axes)
        return np.where(total == 0, np.nan, summed / np.maximum(total, 1))

    def rows(self, least_visible: int = 1) -> np.ndarray:
        """Which rows count, bool `[*B, N, T]`."""
        counts = np.asarray(self.visible) >= least_visible
        return counts if self.counted is None else counts & np.asarray(self.counted)
