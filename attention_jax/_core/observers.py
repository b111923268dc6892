"""Observers: functions that wrap every call of `attend` while they are active.

Without an observer this costs nothing. The active observer is part of the key of JAX's trace cache,
so a function that was traced without one is traced again with it, and the other way round.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax

# (request, run, implementation) -> result: `run(request)` is the call without the observer, and
# `implementation` is the argument of `attend`.
Observer = Callable[[Any, Callable[[Any], Any], Any], Any]

_OBSERVER: contextvars.ContextVar[Any] = contextvars.ContextVar("observer", default=None)
# JAX's caches keep the value of a user context: a mark in place of the observer.
_MARK: Any = jax.make_user_context(None)
_OWNER: contextvars.ContextVar[Any] = contextvars.ContextVar("owner", default=None)


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Passes every call of attention in the context through `observer`."""
    token = _OBSERVER.set(observer)
    try:
        with _MARK(object()):
            yield
    finally:
        _OBSERVER.reset(token)


def observer() -> Observer | None:
    """The active observer, or None."""
    return _OBSERVER.get()


@contextlib.contextmanager
def owned_by(module: Any) -> Iterator[None]:
    """Attributes the calls of attention in the context to `module`."""
    token = _OWNER.set(module)
    try:
        yield
    finally:
        _OWNER.reset(token)


def owner() -> Any:
    """The module to which a call of attention belongs, or None."""
    return _OWNER.get()
