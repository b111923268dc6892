"""What every attention layer holds besides its parameters, and hands to the engine in each call."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import is_concrete, widen
from attention_jax._core.observe import owned_by
from attention_jax._modules.arguments import (
    AnyBias,
    AnyMask,
    combine,
)
from attention_jax._modules.caches import by_position, counted
from attention_jax._modules.flags import Flag, if_training, is_training
from attention_jax._modules.recipes import KERNEL_INIT, Initializer
from attention_jax._modules.settings import check_fields
from attention_jax.attend import attention_weights, execute, make_request
from attention_jax.kernels.request import Result
from attention_jax.linen.randomness import dropout_key, loud
from attention_jax.masks import Mask
from attention_jax.scores import Score


class AttentionLayer(nn.Module, kw_only=True):
    """Base of the layers that call `attend`: their mask, dropout and choice of kernel."""

    dtype: Any = None
    param_dtype: Any = jnp.float32
    dropout_rate: float | int = 0.0
    deterministic: Flag = None
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT
    mask: AnyMask = None
    implementation: str | tuple[str, ...] | None = None
    block_size: int | tuple[int, int] | None = None

    force_fp32_for_softmax = False  # a setting of multi-head attention

    def __post_init__(self) -> None:
        check_fields(self)
        super().__post_init__()

    @nn.nowrap
    def _run(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        score: Score,
        mask: AnyMask,
        bias: AnyBias,
        deterministic: Flag,
        dropout_rng: Any,
        shared_dropout: bool = False,
        statistics: bool = False,
        adapt: Callable[[Result], None] | None = None,
        count: Array | None = None,
        **positions: Any,
    ) -> Result:
        """One call of the engine, with everything the layer has settled.

        `count` says that the keys are those of a cache: how many tokens there are so far.
        """
        score, mask = self._seen(score, mask, count)
        told = self.deterministic if deterministic is None else deterministic
        training = told is not None and is_concrete(told) and not told
        adapting = adapt is not None and training and not self.is_initializing()

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

        result = self._dropped(run, deterministic, dropout_rng, shared_dropout)
        if adapting:
            assert adapt is not None  # as above
            adapt(result)
        return result

    @nn.nowrap
    def _dropped(
        self, run: Callable[..., Result], deterministic: Flag, dropout_rng: Any, shared: bool
    ) -> Result:
        """`run()`, in training with dropout."""
        name = type(self).__name__
        training = is_training(name, self.dropout_rate, deterministic, self.deterministic)
        if training is False:
            return run()
        dropout = {
            "dropout_rate": self.dropout_rate,
            "dropout_key": dropout_key(self, name, training, dropout_rng),
            "shared_dropout": shared,
        }

        def dropped() -> Result:
            return loud(run) if dropout["dropout_key"] is None else run(**dropout)

        return if_training(training, dropped, run)

    @nn.nowrap
    def _weights(
        self,
        query: Array,
        key: Array,
        *,
        score: Score,
        mask: AnyMask,
        bias: AnyBias,
        count: Array | None = None,
        **positions: Any,
    ) -> Array:
        """The weights that a call of the engine would use, before dropout."""
        score, mask = self._seen(score, mask, count)
        return attention_weights(
            widen(query) if self.force_fp32_for_softmax else query,
            key,
            score=score,
            mask=mask,
            bias=bias,
            precision=self.precision,
            **positions,
        )

    @nn.nowrap
    def _seen(self, score: Score, mask: AnyMask, count: Array | None) -> tuple[Score, Mask | None]:
        """The score, and the layer's own mask with the call's; by position over a cache."""
        mask = combine(self.mask, mask)
        return (score, mask) if count is None else (counted(score, count), by_position(mask))
