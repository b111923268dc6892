"""The dropout key of a Linen layer: the stream of `apply(..., rngs={"dropout": key})`."""

from typing import Any

import flax.linen as nn

from attention_jax._core.axes import Array


def dropout_key(
    module: nn.Module, name: str, training: bool | Array = True, given: Any = None
) -> Any:
    """The key given in the call, else the next one of the stream.

    Args:
        module: The module.
        name: The layer's name, for the message.
        training: Whether dropout is active, possibly traced.
        given: A key, or None.

    Returns:
        A key; None if there is none and `training` is traced.

    Raises:
        ValueError: If a key is needed and there is none.
    """
    if given is not None:
        return given
    # Without a stream of this name Flax falls back to that of parameters, which `init` has.
    if module.has_rng("dropout") or module.has_rng("params"):
        return module.make_rng("dropout")
    if not isinstance(training, bool):
        return None
    raise ValueError(
        f'{name} in training needs randomness for dropout: give `rngs={{"dropout": key}}` to '
        "apply, or deterministic=True"
    )
