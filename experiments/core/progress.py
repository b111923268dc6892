"""Progress of a study: a bar with loss and remaining time, or plain lines in a log."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from experiments.core import stop
from experiments.report.blocks import duration


class _Terminal(Console):
    """A console that prints text verbatim, without markup or emoji."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, quiet=quiet)

    def on_broken_pipe(self) -> None:
        """Raise an error again, which Rich would make a SystemExit without a message."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Progress:
    """Shows one piece of work at a time and the study as a whole.

    On a terminal these are two live bars with time left; elsewhere (a pipe, a log file) a plain
    line is printed now and then, since live bars would print nothing until the end there.
    """

    def __init__(self, total: int, quiet_seconds: float = 10.0, *, silent: bool = False):
        """Start with ``total`` units of work, in the study's unit (usually steps)."""
        self.console = _Terminal(quiet=silent)
        self._live = self.console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left", markup=False),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self._live,
        )
        self._all = self._bars.add_task("the whole study", total=total, note="")
        self._one = None
        self._quiet_seconds = quiet_seconds
        self._spoke = time.monotonic()

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a persistent line."""
        stop.check()
        self.console.print(text)
        self._spoke = time.monotonic()

    @contextlib.contextmanager
    def piece(self, name: str, total: int, done: int = 0) -> Iterator["Piece"]:
        """Show a bar for one piece of work of ``total`` units, ``done`` of them done before."""
        task = self._bars.add_task(name, total=total, completed=done, note="")
        if done:
            self._bars.advance(self._all, done)
        try:
            yield Piece(self, task, name, total, done)
        finally:
            self._bars.remove_task(task)

    def skip(self, units: int) -> None:
        """Count ``units`` that an earlier session of the run has done."""
        self._bars.advance(self._all, units)


class Piece:
    """The running piece of work."""

    def __init__(self, progress: Progress, task: TaskID, name: str, total: int, done: int):
        self._progress, self._task, self._name, self._total = progress, task, name, total
        self._done = self._first = done
        self._begun = time.monotonic()

    def advance(self, note: str, units: int = 1) -> None:
        """Count ``units`` as done; ``note``, such as the loss, is shown beside the bar."""
        p = self._progress
        self._done += units
        p._bars.update(self._task, advance=units, note=note)
        p._bars.advance(p._all, units)
        now = time.monotonic()
        if not p._live and now - p._spoke >= p._quiet_seconds:
            each = (now - self._begun) / (self._done - self._first)
            left = duration(each * (self._total - self._done))
            p.say(f"{self._name}: {self._done}/{self._total}, {note}, {left} left")
