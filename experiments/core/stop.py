"""Stopping on SIGINT and SIGTERM, from the first moment of a run to its last.

A signal sets a flag, and raises `Stopped` at once unless a `held` block has to finish first. Python
discards an exception that a handler raises inside a finaliser or a garbage-collection callback, as
JAX installs one, so the flag is checked again wherever the program passes `check`.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """The run was asked to stop."""


class _State:
    installed = False
    asked = False
    held = 0


def asked() -> bool:
    """Return whether a signal has come."""
    return _State.asked


def check() -> None:
    """Raise `Stopped` if a signal has come and no `held` block has to finish first."""
    if _State.asked and not _State.held:
        raise Stopped


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM within the block; the handlers before it are restored.

    Outside the main thread, where Python allows no handlers, and inside another such block it does
    nothing.
    """
    if _State.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _handle) for number in _SIGNALS}
    _State.installed, _State.asked = True, False
    try:
        yield
    finally:
        _State.installed = False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Let the first signal only set the flag: the block asks `asked` where it can stop.

    A second signal raises `Stopped` at once.
    """
    with signals():
        _State.held += 1
        try:
            yield
        finally:
            _State.held -= 1


def _handle(number: int, frame: object) -> None:
    first, _State.asked = not _State.asked, True
    if not (first and _State.held):
        raise Stopped
