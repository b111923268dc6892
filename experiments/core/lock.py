"""A lock on a run folder: one process at a time works there."""

import os
from pathlib import Path

from experiments import files
from experiments.errors import UsageError

NAME = "run.lock"
_locks: dict[Path, int] = {}  # open files by the folder that this process has locked


def lock(path: Path) -> None:
    """Lock a run folder for this process; the system releases the lock when the process ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: there is no such lock
        return
    try:
        place = path.resolve(strict=True)
        if place in _locks:
            return
        number = os.open(place / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:  # there is no folder to lock
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(number, 20).decode(errors="replace").strip()
        os.close(number)
        raise UsageError(
            f"--out {files.short(path)} is in use by another process"
            + (f" (number {owner})" if owner else "")
        ) from None
    except OSError:  # a file system without locks
        os.close(number)
        return
    os.ftruncate(number, 0)
    os.write(number, f"{os.getpid()}\n".encode())
    _locks[place] = number


def unlock(path: Path) -> None:
    """Release the lock of `lock`."""
    number = _locks.pop(Path(os.path.realpath(path)), None)
    if number is not None:
        os.close(number)
