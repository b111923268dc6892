"""Looking on: what runs while somebody wants to see, or change, every call of attention.

Nothing here costs anything while nobody looks. Who does is part of the key under which JAX caches
what it traces, so a function that was traced unobserved is traced again, and the other way round.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

# request, run -> result: `run(request)` is what would have happened.
Observer = Callable[[Any, Callable[[Any], Any]], Any]

_OBSERVER: Any = jax.make_user_context(None)
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Inside, every call of attention goes through `observer`, a hashable function."""
    with _OBSERVER(observer):
        yield


def observer() -> Observer | None:
    """Who looks on at the moment."""
    return _OBSERVER.value


@contextlib.contextmanager
def owned_by(module: Any) -> Iterator[None]:
    """Inside, calls of attention belong to `module`."""
    token = _OWNER.set(module)
    try:
        yield
    finally:
        _OWNER.reset(token)


def owner() -> Any:
    """The module whose attention runs at the moment, None where nobody says."""
    return _OWNER.get()
