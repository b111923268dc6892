"""What every attention layer holds besides its parameters, and hands to the engine in each call."""

from typing import Any

from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.numerics import is_concrete, widen
from attention_jax._core.observe import owned_by
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    as_mask,
    combine,
)
from attention_jax._modules.caches import by_position, counted
from attention_jax._modules.flags import Flag, if_training
from attention_jax._modules.recipes import Sizes
from attention_jax._modules.settings import check_settings
from attention_jax.attend import attention_weights, execute, make_request
from attention_jax.kernels.request import Result
from attention_jax.masks import Mask
from attention_jax.nnx.places import PositionParameters
from attention_jax.nnx.randomness import AnyRngs, dropout_key, fork_stream, is_training
from attention_jax.nnx.scores import ScoreParameters
from attention_jax.scores import Score
from attention_jax.softmax import Stats


class AttentionLayer(nnx.Module):
    """Base of the layers that call `attend`: their score, mask, dropout and choice of kernel."""

    score: ScoreParameters
    positions: PositionParameters | None = None

    force_fp32_for_softmax = False  # a setting of multi-head attention

    def _settle(
        self,
        *,
        mask: AnyMask,
        dropout_rate: float | int,
        broadcast_dropout: bool = False,
        deterministic: Flag,
        precision: Any,
        implementation: str | tuple[str, ...] | None,
        block_size: int | tuple[int, int] | None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> None:
        check_settings(
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            precision=precision,
            implementation=implementation,
            block_size=block_size,
            keep_rngs=keep_rngs,
        )
        self.dropout_rate = float(dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.precision = precision
        self.implementation = implementation
        self.block_size = block_size
        self.rngs = nnx.data(fork_stream(rngs, dropout_rate) if keep_rngs else None)
        self.mask = nnx.data(as_mask(mask))

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `flax.nnx.view` sets.

        Args:
            deterministic: Whether to leave dropout out.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: AnyMask,
        bias: AnyBias,
        deterministic: Flag,
        rngs: AnyRngs,
        statistics: bool = False,
        count: Array | None = None,
        **positions: Any,
    ) -> Result:
        """One call of the engine, with everything the layer has settled.

        `count` says that the keys are those of a cache: how many tokens there are so far.
        """
        name = type(self).__name__
        told = self.deterministic if deterministic is None else deterministic
        adapting = self.score.adapts and told is not None and is_concrete(told) and not told

        score, mask = self._seen(mask, count)

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

        training = is_training(name, self.dropout_rate, deterministic, self.deterministic)
        if training is False:
            return self._adapted(run(), adapting)
        dropout = {
            "dropout_rate": self.dropout_rate,
            "dropout_key": dropout_key(name, rngs, self.rngs),
            "shared_dropout": self.broadcast_dropout,
        }
        return self._adapted(if_training(training, lambda: run(**dropout), run), adapting)

    def _adapted(self, result: Result, adapting: bool) -> Result:
        if adapting:
            self.score.adapt(Sizes(1, 1, 1), result)
        return result

    def _run_with_stats(self, *arrays: Array, **options: Any) -> tuple[Array, Stats]:
        result = self._run(*arrays, **options, statistics=True)
        stats = result.stats
        assert stats is not None  # asked for above
        return result.out, stats

    def _weights(
        self,
        query: Array,
        key: Array,
        *,
        mask: AnyMask,
        bias: AnyBias,
        count: Array | None = None,
        **positions: Any,
    ) -> Array:
        """The weights that a call of the engine would use, before dropout."""
        score, mask = self._seen(mask, count)
        return attention_weights(
            widen(query) if self.force_fp32_for_softmax else query,
            key,
            score=score,
            mask=mask,
            bias=bias,
            precision=self.precision,
            **positions,
        )

    def _sow(self, weights: Array) -> None:
        """Sows the weights under Flax's name for them, which here is that of a method."""
        name = "attention_weights"
        if hasattr(self, "__captures__") or name in vars(self):
            self.sow(nnx.Intermediate, name, weights)
        else:  # what Flax's own sow does, which takes the method for something sown before
            setattr(self, name, nnx.Intermediate((weights,)))

    def _seen(self, mask: AnyMask, count: Array | None) -> tuple[Score, Mask | None]:
        """The score, and the layer's own mask with the call's; by position over a cache."""
        score, mask = self._score(), combine(self.mask, mask)
        return (score, mask) if count is None else (counted(score, count), by_position(mask))

    def _score(self) -> Score:
        """The score, and what the position scheme adds to it."""
        score = self.score()
        added = None if self.positions is None else self.positions.bias()
        return score if added is None else score + added
