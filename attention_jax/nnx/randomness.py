"""When a layer drops something out, and which key it uses: the rules of Flax, said once.

A flag given in the call wins over the one given at construction; `train()` and `eval()` set the
latter. A stream given in the call wins over the one forked at construction. Without a rate neither
is looked at.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_rate
from attention_jax._core.numerics import is_concrete
from attention_jax._modules.flags import Flag, if_training

AnyRngs = nnx.Rngs | nnx.RngStream | None


def check_rngs(name: str, rngs: Any) -> None:
    """Raises a TypeError where the `rngs` of the constructor of `name` are something else."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{name}: rngs must be flax.nnx.Rngs, such as nnx.Rngs(0), got {type(rngs).__name__}"
        )


def fork_stream(rngs: nnx.Rngs, rate: float | int) -> nnx.RngStream | None:
    """A "dropout" stream for a layer to keep; None where it needs none or `rngs` has none."""
    if rate == 0.0 or not ("dropout" in rngs or "default" in rngs):
        return None
    return rngs.dropout.fork()


def is_training(name: str, rate: float | int, call: Flag, constructed: Flag) -> bool | Array:
    """Whether a layer drops anything out now; traced where the flag is.

    Args:
        name: The layer's name, for the message.
        rate: Its dropout rate.
        call: `deterministic` as given in the call.
        constructed: `deterministic` as given at construction.

    Raises:
        ValueError: If there is a rate, and neither flag says which it is.
    """
    if rate == 0.0:
        return False
    deterministic = constructed if call is None else call
    if deterministic is None:
        raise ValueError(
            f"{name} has dropout rate {rate} and must be told whether to use it: give "
            "`deterministic` at construction or in the call, or call train() or eval()"
        )
    return not deterministic if is_concrete(deterministic) else jnp.logical_not(deterministic)


def dropout_key(name: str, call: AnyRngs, constructed: AnyRngs) -> Array:
    """The next key of the stream in force.

    Raises:
        TypeError: If it is none.
        ValueError: If there is no stream.
    """
    stream: Callable[[], Array] | None = constructed if call is None else call
    if stream is not None and not isinstance(stream, nnx.Rngs | nnx.RngStream):
        raise TypeError(
            f"{name} in training: rngs must be flax.nnx.Rngs or one of its streams, "
            f"got {type(stream).__name__}"
        )
    if isinstance(stream, nnx.Rngs):
        if not ("dropout" in stream or "default" in stream):
            raise ValueError(f"{name} in training: `rngs` has no stream named dropout or default")
        stream = stream.dropout
    if stream is None:
        raise ValueError(
            f"{name} in training needs randomness for dropout: give `rngs` with a stream named "
            "dropout or default, at construction or in the call, or deterministic=True"
        )
    return stream()


class Dropout(nnx.Module):
    """Dropout of a layer's output, `x · keep / (1 − rate)`, under the rules of this module.

    Args:
        rate: The probability that an entry is dropped, in [0, 1).
        name: The layer it belongs to, for messages.
        deterministic: Whether to leave x alone, unless the call says otherwise.
        rngs: Where the stream is forked from.
    """

    def __init__(
        self, rate: float | int, *, name: str, deterministic: Flag, rngs: nnx.Rngs
    ) -> None:
        self.rate = check_rate("dropout_rate", rate)
        self.name = name
        self.deterministic = deterministic
        self.rngs = nnx.data(fork_stream(rngs, rate))

    def __call__(
        self, x: Float[Array, "..."], *, deterministic: Flag = None, rngs: AnyRngs = None
    ) -> Float[Array, "..."]:
        """`x`, with entries dropped in training."""
        training = is_training(self.name, self.rate, deterministic, self.deterministic)
        if training is False:
            return x
        key = dropout_key(self.name, rngs, self.rngs)

        def dropped() -> Array:
            keep = jax.random.bernoulli(key, 1.0 - self.rate, x.shape)
            return jnp.where(keep, x / (1.0 - self.rate), 0.0)

        return if_training(training, dropped, lambda: jnp.asarray(x))

    def set_view(self, deterministic: bool | None = None) -> None:
        """What `flax.nnx.view` sets.

        Args:
            deterministic: Whether to leave x alone.
        """
        if deterministic is not None:
            self.deterministic = deterministic
