"""Dropout in training: when it applies, and which key it uses."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax.layers.body import Body, settings
from attention_jax.layers.training import Flag, if_training, is_training

Out = TypeVar("Out")


class DroppingLayer(Body):
    """A layer with dropout in training."""

    deterministic: Flag

    def _drop_in_training(
        self,
        name: str,
        rate: float,
        deterministic: Flag,
        random: Mapping[str, Any],
        plain: Callable[[], Out],
        dropped: Callable[[Any], Out],
    ) -> Out:
        """`dropped(key)` in training with a positive rate, else `plain()`."""
        self._check_random(random)
        flags = (deterministic, self.deterministic)
        training = is_training(name, rate, *flags, self._flag_hint)
        if training is False:
            return plain()
        key = self._dropout_key(name, training, **random)

        def drop() -> Out:
            if key is not None:
                return dropped(key)
            # The traced flag is False at run time and there is no key: the result is NaN.
            shapes = jax.eval_shape(plain)
            return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)

        return if_training(training, drop, plain)


@settings
class Dropout(DroppingLayer):
    """Dropout of a layer's output, `x · keep / (1 − rate)`.

    Args:
        rate: The probability that an entry is dropped, in [0, 1).
        layer: The name of the layer that contains it, for error messages.
        deterministic: Whether to return x unchanged; a call's flag overrides it.
    """

    rate: float | int
    layer: str
    _: dataclasses.KW_ONLY
    deterministic: Flag = None

    def _build(self, make: Any) -> None:
        make.dropout_stream(self.rate)

    def __call__(
        self, x: Float[Array, "..."], *, deterministic: Flag = None, **random: Any
    ) -> Float[Array, "..."]:
        """`x`, with entries dropped in training."""

        def dropped(key: Any) -> Array:
            keep = jax.random.bernoulli(key, 1.0 - self.rate, x.shape)
            return jnp.where(keep, x / (1.0 - self.rate), 0.0)

        return self._drop_in_training(
            self.layer, self.rate, deterministic, random, lambda: jnp.asarray(x), dropped
        )
