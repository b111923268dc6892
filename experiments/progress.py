"""What a person sees while a study runs: a bar with loss and time left, or plain lines in a log."""

import contextlib
import signal
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from experiments.report.blocks import duration


class Progress:
    """Shows one piece of work at a time and the study as a whole.

    On a terminal these are two live bars with time left; elsewhere (a pipe, a log file) a plain
    line is printed now and then, since live bars would print nothing until the end there.
    """

    def __init__(self, total: int, quiet_seconds: float = 10.0):
        """Start with ``total`` units of work ahead, in the study's own unit (mostly steps)."""
        self.console = Console(highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
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
        """Print a line that stays."""
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
        """Count ``units`` as done that an earlier sitting of the run did."""
        self._bars.advance(self._all, units)


class Piece:
    """The running piece of work."""

    def __init__(self, progress: Progress, task: int, name: str, total: int, done: int):
        self._progress, self._task, self._name, self._total = progress, task, name, total
        self._done = self._first = done
        self._begun = time.monotonic()

    def advance(self, note: str) -> None:
        """Count one unit as done; ``note`` (the loss, say) is shown beside the bar."""
        p = self._progress
        self._done += 1
        p._bars.update(self._task, advance=1, note=note)
        p._bars.advance(p._all)
        now = time.monotonic()
        if not p._live and now - p._spoke >= p._quiet_seconds:
            each = (now - self._begun) / (self._done - self._first)
            left = duration(each * (self._total - self._done))
            p.say(f"{self._name}: {self._done}/{self._total}, {note}, {left} left")


class Stop:
    """Asks to stop at the next safe point when SIGINT or SIGTERM comes.

    Within ``with Stop() as stop`` the first signal only sets ``stop.asked``; a second one raises
    KeyboardInterrupt at once. Outside the main thread, where Python allows no handlers, it does
    nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
