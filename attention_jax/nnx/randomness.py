"""The streams of dropout keys: a call's stream overrides the one forked at construction."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from attention_jax._core.axes import Array

AnyRngs = nnx.Rngs | nnx.RngStream | None


def check_rngs(name: str, rngs: Any) -> None:
    """Raises a TypeError if the `rngs` of the constructor of `name` are not streams."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{name}: rngs must be flax.nnx.Rngs, such as nnx.Rngs(0), got {type(rngs).__name__}"
        )


def fork_stream(rngs: nnx.Rngs, rate: float | int) -> nnx.RngStream | None:
    """The "dropout" stream that a layer keeps; None if it needs none or `rngs` has none."""
    if rate == 0.0 or not ("dropout" in rngs or "default" in rngs):
        return None
    return rngs.dropout.fork()


def dropout_key(name: str, call: AnyRngs, constructed: AnyRngs) -> Array:
    """The next key of the call's or the layer's stream.

    Raises:
        TypeError: If it is not a stream.
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
