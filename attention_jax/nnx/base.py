"""What every attention layer holds besides its parameters, and hands to the engine in each call."""

from typing import Any

from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_rate
from attention_jax._core.observe import owned_by
from attention_jax._modules.arguments import AnyBias, AnyMask, as_mask, combine
from attention_jax.attend import attention_weights, execute, make_request
from attention_jax.kernels.request import Result
from attention_jax.nnx.randomness import AnyRngs, dropout_key, fork_stream, is_training
from attention_jax.nnx.scores import ScoreParameters
from attention_jax.softmax import Stats


class AttentionLayer(nnx.Module):
    """Base of the layers that call `attend`: their score, mask, dropout and choice of kernel."""

    score: ScoreParameters

    def _settle(
        self,
        *,
        mask: AnyMask,
        dropout_rate: float | int,
        broadcast_dropout: bool = False,
        deterministic: bool | None,
        precision: Any,
        implementation: str | tuple[str, ...] | None,
        block_size: int | tuple[int, int] | None,
        rngs: nnx.Rngs,
    ) -> None:
        self.dropout_rate = check_rate("dropout_rate", dropout_rate)
        self.broadcast_dropout = broadcast_dropout
        self.deterministic = deterministic
        self.precision = precision
        self.implementation = implementation
        self.block_size = block_size
        self.rngs = nnx.data(fork_stream(rngs, dropout_rate))
        self.mask = nnx.data(as_mask(mask))

    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: AnyMask,
        bias: AnyBias,
        deterministic: bool | None,
        rngs: AnyRngs,
        statistics: bool = False,
    ) -> Result:
        """One call of the engine, with everything the layer has settled."""
        dropout = {}
        name = type(self).__name__
        if is_training(name, self.dropout_rate, deterministic, self.deterministic):
            dropout = {
                "dropout_rate": self.dropout_rate,
                "dropout_key": dropout_key(name, rngs, self.rngs),
                "shared_dropout": self.broadcast_dropout,
            }
        request = make_request(
            query,
            key,
            value,
            score=self.score(),
            mask=combine(self.mask, mask),
            bias=bias,
            block_size=self.block_size,
            precision=self.precision,
            statistics=statistics,
            **dropout,
        )
        with owned_by(self):
            return execute(request, self.implementation)

    def _run_with_stats(self, *arrays: Array, **options: Any) -> tuple[Array, Stats]:
        result = self._run(*arrays, **options, statistics=True)
        assert result.stats is not None  # asked for above
        return result.out, result.stats

    def _weights(self, query: Array, key: Array, *, mask: AnyMask, bias: AnyBias) -> Array:
        """The weights that a call of the engine would use, before dropout."""
        return attention_weights(
            query,
            key,
            score=self.score(),
            mask=combine(self.mask, mask),
            bias=bias,
            precision=self.precision,
        )
