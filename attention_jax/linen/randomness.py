"""Which key a layer drops out with: the stream "dropout" of `apply(..., rngs={"dropout": key})`."""

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
