"""Rematerialisation policies, the `remat=` argument of a stack."""

from collections.abc import Callable
from typing import Any

import jax

Remat = bool | str | Callable[..., Any]


def checkpoint_policy(remat: Remat) -> Callable[..., Any] | None:
    """The policy of a `remat=` argument; None recomputes everything.

    Raises:
        ValueError: If there is no policy of that name.
        TypeError: If it is not a policy.
    """
    if isinstance(remat, bool):
        return None
    if isinstance(remat, str):
        if not hasattr(jax.checkpoint_policies, remat):
            names = (n for n in dir(jax.checkpoint_policies) if not n.startswith("_"))
            raise ValueError(f"unknown remat policy {remat!r}: the names are {', '.join(names)}")
        return getattr(jax.checkpoint_policies, remat)
    if not callable(remat):
        raise TypeError(f"remat must be a bool, a policy or its name, got {type(remat).__name__}")
    return remat
