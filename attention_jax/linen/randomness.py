"""Which key a layer drops out with: the stream "dropout" of `apply(..., rngs={"dropout": key})`."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_rate
from attention_jax._modules.flags import Flag, if_training, is_training

Out = TypeVar("Out")


def dropout_key(
    module: nn.Module, name: str, training: bool | Array = True, given: Any = None
) -> Any:
    """The key given in the call, else the next one of the stream.

    Args:
        module: The module that asks.
        name: The layer's name, for the message.
        training: Whether it drops anything out, maybe traced.
        given: A key, or None.

    Returns:
        A key; None where there is none and it is not known whether it is needed.

    Raises:
        ValueError: If there is none and it is needed.
    """
    if given is not None:
        return given
    # Without a stream of this name Flax takes the one for parameters, which `init` has.
    if module.has_rng("dropout") or module.has_rng("params"):
        return module.make_rng("dropout")
    if not isinstance(training, bool):
        return None
    raise ValueError(
        f'{name} in training needs randomness for dropout: give `rngs={{"dropout": key}}` to '
        "apply, or deterministic=True"
    )


def loud(run: Callable[[], Out]) -> Out:
    """NaN for all that `run` returns: where a traced flag says training, and there is no key."""
    return jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), jax.eval_shape(run))


class Dropout(nn.Module):
    """Dropout of a layer's output, `x · keep / (1 − rate)`.

    Args:
        rate: The probability that an entry is dropped, in [0, 1).
        layer: The name of the layer it belongs to, for messages.
        deterministic: Whether to leave x alone, unless the call says otherwise.
    """

    rate: float | int
    layer: str
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        check_rate("dropout_rate", self.rate)
        super().__post_init__()

    def __call__(
        self, x: Float[Array, "..."], *, deterministic: Flag = None
    ) -> Float[Array, "..."]:
        """`x`, with entries dropped in training."""
        training = is_training(self.layer, self.rate, deterministic, self.deterministic)
        if training is False:
            return x
        key = dropout_key(self, self.layer, training)

        def dropped() -> Array:
            if key is None:
                return loud(lambda: x)
            keep = jax.random.bernoulli(key, 1.0 - self.rate, x.shape)
            return jnp.where(keep, x / (1.0 - self.rate), 0.0)

        return if_training(training, dropped, lambda: x)
