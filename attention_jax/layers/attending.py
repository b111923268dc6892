"""The base of the layers that call `attend`: their score, mask, dropout and choice of kernel."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_flag
from attention_jax._core.numerics import is_concrete, widen
from attention_jax._core.observers import owned_by
from attention_jax.attend import attention_weights, execute, make_request
from attention_jax.kernels.request import Result
from attention_jax.layers.arguments import AnyBias, AnyMask, as_mask, combine
from attention_jax.layers.body import LinearSettings, settings
from attention_jax.layers.caches import by_position, counted
from attention_jax.layers.dropout import DroppingLayer
from attention_jax.layers.recipes import Sizes
from attention_jax.layers.training import Flag
from attention_jax.masks import Mask
from attention_jax.scores import Score
from attention_jax.softmax import Stats


@settings
class AttentionLayer(LinearSettings, DroppingLayer):
    """A layer that calls `attend`.

    Args:
        dropout_rate: Probability that a weight is dropped in training, in [0, 1).
        deterministic: Whether to disable dropout; a call's flag overrides it.
        mask: A mask object or boolean array that holds in every call.
    """

    _: dataclasses.KW_ONLY
    dropout_rate: float | int = 0.0
    deterministic: Flag = None
    mask: AnyMask = None
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None

    broadcast_dropout = force_fp32_for_softmax = False  # settings of multi-head attention

    _passed_on = ("score", "positions")
    _with_arrays: ClassVar[Mapping[str, Any]] = {"mask": as_mask}
    _arguments: ClassVar[Mapping[str, str]] = {
        "mask": "A mask object or boolean array, True where a query may attend to a key.",
        "bias": "Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.",
        "deterministic": "Whether to disable dropout; overrides the constructor's flag.",
    }

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: AnyMask,
        bias: AnyBias = None,
        deterministic: Flag,
        random: Mapping[str, Any],
        statistics: bool = False,
        count: Array | None = None,
        **positions: Any,
    ) -> Result:
        """Calls `attend` with the settings of the layer.

        Args:
            query: `[*B, T, N, H]`.
            key: `[*B, S, K, H]`.
            value: `[*B, S, K, V]`.
            mask: The call's mask.
            bias: The call's bias.
            deterministic: The call's flag.
            random: The flavour's arguments, for the dropout key.
            statistics: Whether to return statistics.
            count: The number of cached tokens, `[*B]`, if the keys are those of a cache.
            **positions: Positions of queries and keys.
        """
        score, mask = self._score_and_mask(query, key, mask, count)
        check_flag("deterministic", deterministic)
        flag = self.deterministic if deterministic is None else deterministic
        training = flag is not None and is_concrete(flag) and not flag
        adapting = training and self._part("score").adapts

        def run(**dropout: Any) -> Result:
            request = make_request(
                query,
                key,
                value,
                score=score,
                mask=mask,
                bias=bias,
                block_size=self.block_size,
                precision=self.precision,
                statistics=statistics or adapting,
                **positions,
                **dropout,
            )
            with owned_by(self):
                return execute(request, self.implementation)

        def dropped(dropout_key: Any) -> Result:
            how = {"dropout_rate": self.dropout_rate, "shared_dropout": self.broadcast_dropout}
            return run(dropout_key=dropout_key, **how)

        name, rate = type(self).__name__, self.dropout_rate
        result = self._drop_in_training(name, rate, deterministic, random, run, dropped)
        if adapting:
            self._part("score").adapt(Sizes.of(query, key), result)
        return result

    def _run_with_stats(self, *arrays: Array, **options: Any) -> tuple[Array, Stats]:
        result = self._run(*arrays, statistics=True, **options)
        return result.out, _present(result)

    def _weights(
        self,
        query: Array,
        key: Array,
        *,
        mask: AnyMask,
        bias: AnyBias = None,
        count: Array | None = None,
        **positions: Any,
    ) -> Array:
        """The weights that `_run` uses, before dropout."""
        score, mask = self._score_and_mask(query, key, mask, count)
        options = {"score": score, "mask": mask, "bias": bias, "precision": self.precision}
        query = widen(query) if self.force_fp32_for_softmax else query
        return attention_weights(query, key, **options, **positions)

    def _score_and_mask(
        self, query: Array, key: Array, mask: AnyMask, count: Array | None
    ) -> tuple[Score, Mask | None]:
        """The score and the conjunction of the layer's and the call's masks."""
        score, mask = self._score(query, key), combine(self.mask, mask)
        return (score, mask) if count is None else (counted(score, count), by_position(mask))

    def _score(self, query: Array, key: Array) -> Score:
        """The score of these queries and keys, with the current values of its parameters."""
        return self._part("score")(Sizes.of(query, key))


def _present(result: Result) -> Stats:
    stats = result.stats
    assert stats is not None  # the request was for statistics
    return stats
