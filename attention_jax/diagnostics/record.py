"""The record of one call of attention: quantities of each row, and static facts of the call."""

from typing import Any, NamedTuple

import numpy as np

from attention_jax._core.pytrees import Record, pytree, static


class Facts(NamedTuple):
    """Static facts of a call of attention.

    Attributes:
        kind: class of the module, or "attend" outside of modules.
        order: index of the call, in order of execution.
        score: repr of the score.
        mask: repr of the mask, or None.
        scale: the factor on the dot product if the score is one, else None.
        depth: H, depth of the query.
        dtype: dtype of the query.
        implementation: the kernel that runs this call without `capture`.
        batch_axes: number of axes `*B`.
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


@pytree
class AttentionRecord(Record):
    """Statistics of one call of attention; rows are `[*B, N, T]`, before dropout, float32 at least.

    Rows without visible keys are 0 everywhere. Optional quantities are None unless requested.

    Attributes:
        entropy: `-Σ p ln p`, in nats.
        relative_entropy: entropy divided by ln of the number of visible keys; 0 if that is 1.
        largest_weight: `max_s p`.
        first_share: weight on the key with index 0.
        self_share: weight on keys at the query's position.
        ahead_share: weight on keys at later positions than the query's.
        padding_share: weight on padding keys; None without `real`.
        mean_key: `Σ p s / (S - 1)`, the mean key index, from 0 to 1.
        visible: number of visible keys.
        max_logit: the largest visible logit.
        logit_range: the largest minus the smallest visible logit.
        jacobian_norm: Frobenius norm of the softmax Jacobian, `diag(p) - p pᵀ`.
        out_norm: Euclidean norm of the head's output.
        out_weight: norm of each head's slice of the output projection, `[N]`; None without one.
        largest: the largest absolute finite entry of query, key, value and out, `[4]`.
        bad: number of positions of query, key, value and out with non-finite entries, `[4]`.
        counted: bool `[*B, N, T]`, the queries that are not padding; None without `real`.
        similarity: `[*B, N, N]`, cosines between the heads' centred weights.
        weights: `[*B, N, T, S]`.
        mean_map: `[*B, T, S]`, the mean of the weights over heads.
        facts: static facts of the call.
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
        return type(self).__name__, {"kind": self.facts.kind, "entropy": self.entropy}

    @property
    def num_heads(self) -> int:
        """N."""
        return int(self.entropy.shape[-2])

    def per_head(self, name: str, *, least_visible: int = 1) -> np.ndarray:
        """The mean of a row quantity over examples and queries, `[N]`.

        Args:
            name: the attribute.
            least_visible: rows with fewer visible keys are left out, and so is padding; a head
                without remaining rows is NaN.
        """
        rows = np.asarray(getattr(self, name), np.float64)
        counts = self.rows(least_visible)
        axes = tuple(i for i in range(rows.ndim) if i != rows.ndim - 2)
        total = counts.sum(axes)
        summed = np.where(counts, rows, 0).sum(axes)
        return np.where(total == 0, np.nan, summed / np.maximum(total, 1))

    def rows(self, least_visible: int = 1) -> np.ndarray:
        """The rows with at least `least_visible` visible keys, without padding; bool `[*B, N, T]`.

        Args:
            least_visible: the number of keys.
        """
        counts = np.asarray(self.visible) >= least_visible
        return counts if self.counted is None else counts & np.asarray(self.counted)
