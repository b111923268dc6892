"""A score scaled by the logarithm of a query's position, for causal attention of any length."""

from typing import Any

import jax.numpy as jnp

from attention_jax._core.axes import Array, Layout
from attention_jax._core.checks import check_per_head
from attention_jax._core.pytrees import pytree
from attention_jax._core.term import head_axis
from attention_jax.scores.modifiers import Modified, keep_masked


@pytree
class LogPosition(Modified):
    """`s · ln(p + 1) · score` for a query at p, which has p + 1 keys at or before it."""

    s: Any

    def _call(self) -> tuple[str, dict[str, Any]]:
        return "log_position", {"score": self.score, "s": self.s}

    def check(self, layout: Layout) -> None:
        """`s` is a scalar or one for each head."""
        self.score.check(layout)
        check_per_head("s", self.s, "", layout)

    def per_head(self) -> "LogPosition":
        """`s` with its head axis."""
        return LogPosition(self.score.per_head(), head_axis(self.s, 0))

    def block(self, sides: Any, query_positions: Array, key_positions: Array) -> Array:
        """Scales each row."""
        scores = self.score.block(sides, query_positions, key_positions)
        count = jnp.maximum(query_positions, 0).astype(scores.dtype) + 1
        factor = jnp.asarray(self.s).astype(scores.dtype) * jnp.log(count)
        return keep_masked(self.score, scores, lambda x: x * factor[:, None])
