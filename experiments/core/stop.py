"""Stopping on SIGINT and SIGTERM at any time during a run.

A handler that raises is not sufficient: Python discards exceptions raised inside a finaliser or a
callback of the garbage collector, where JAX has one, extension modules abort if one is raised while
they are initialised, and no handler runs while the main thread compiles. Therefore a thread waits
for the signals and ends the process; files are written atomically, so that it can end anytime. Only
a `held` block is finished first: a signal sets a flag, and the block stops when its state is saved.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal requested the run to stop."""


class _State:
    installed = False
    asked = False
    held = 0


def asked() -> bool:
    """Return whether a signal was received."""
    return _State.asked


def check() -> None:
    """Raise `Stopped` if a signal was received and no `held` block has to finish first."""
    if _State.asked and not _State.held:
        raise Stopped


def end_process_with(leave: Callable[[], None]) -> None:
    """Handle signals from now on: ``leave`` is called in a thread, and ends the process.

    The first signal within a `held` block only sets the flag; a second one ends the process.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in _SIGNALS:
        signal.signal(number, _ignore)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _State.installed = True
    threading.Thread(target=_watch, args=(read, leave), daemon=True).start()


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Let a signal within the block raise `Stopped`; the handlers before it are restored.

    For a run that is part of a larger process, which must not be ended. After `end_process_with`,
    inside another such block, and outside the main thread, where Python allows no handlers, it
    changes nothing.
    """
    if _State.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _raise) for number in _SIGNALS}
    _State.installed, _State.asked = True, False
    try:
        yield
    finally:
        _State.installed = False
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Make the first signal only set the flag: the block checks `asked` where it can stop."""
    with signals():
        _State.held += 1
        try:
            yield
        finally:
            _State.held -= 1


def _come() -> bool:
    """Set the flag and return whether to stop at once."""
    first, _State.asked = not _State.asked, True
    return not (first and _State.held)


def _watch(read: int, leave: Callable[[], None]) -> None:
    while True:
        for number in os.read(read, 64):
            if number in _SIGNALS and _come():
                leave()


def _raise(number: int, frame: FrameType | None) -> None:
    if _come():
        raise Stopped


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: with a handler, Python passes the signal's number on to the thread."""
