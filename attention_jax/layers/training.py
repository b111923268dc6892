"""Whether dropout is active: by flags that are known, or traced."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import is_concrete

# A traced boolean too: under a remat that traces keywords Python's own are no longer known.
Flag = Annotated[Any, bool | None]
Out = TypeVar("Out")


def is_training(
    name: str, rate: float | int, call: Flag, constructed: Flag, hint: str = ""
) -> bool | Array:
    """Whether dropout is active; the call's flag wins over the constructor's.

    Args:
        name: The layer's name, for the message.
        rate: Its dropout rate; without one flags are ignored.
        call: `deterministic` as given in the call.
        constructed: `deterministic` as given at construction.
        hint: How else the flag is set, for the message.

    Returns:
        A plain bool, or a traced one where the flag is traced.

    Raises:
        ValueError: If there is a rate and neither flag is given.
    """
    if rate == 0.0:
        return False
    deterministic = constructed if call is None else call
    if deterministic is None:
        raise ValueError(
            f"{name} has dropout rate {rate}: give `deterministic` at construction or in the "
            f"call{hint}"
        )
    return not deterministic if is_concrete(deterministic) else jnp.logical_not(deterministic)


def if_training(
    training: bool | Array, dropped: Callable[[], Out], plain: Callable[[], Out]
) -> Out:
    """`dropped()` in training, else `plain()`; a branch where the flag is traced."""
    if isinstance(training, bool):
        return dropped() if training else plain()
    return jax.lax.cond(training, dropped, plain)
