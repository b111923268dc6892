"""Whether dropout is active, by static or traced flags."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_flag
from attention_jax._core.numerics import is_concrete

# A traced boolean is allowed too: a remat that traces keyword arguments traces Python's booleans.
Flag = Annotated[Any, bool | None]
Out = TypeVar("Out")


def is_training(
    name: str, rate: float | int, call: Flag, constructed: Flag, hint: str = ""
) -> bool | Array:
    """Whether dropout is active; the call's flag overrides the constructor's.

    Args:
        name: The layer's name, for the message.
        rate: Its dropout rate; without one flags are ignored.
        call: `deterministic` as given in the call.
        constructed: `deterministic` as given at construction.
        hint: Another way to set the flag, for the message.

    Returns:
        A Python bool, or a traced one if the flag is traced.

    Raises:
        ValueError: If there is a rate and neither flag is given.
        TypeError: If the call's flag is not a boolean.
    """
    check_flag("deterministic", call)
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
    """`dropped()` in training, else `plain()`; a `lax.cond` if the flag is traced."""
    if isinstance(training, bool):
        return dropped() if training else plain()
    return jax.lax.cond(training, dropped, plain)
