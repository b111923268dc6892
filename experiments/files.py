"""Files of a run: atomic writes, and reads of regular files only."""

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from experiments.errors import UsageError

# Errors of the machine or of a file name, which are not bugs of the program.
_REFUSALS = frozenset(
    getattr(errno, name)
    for name in (
        "EACCES", "EDQUOT", "EEXIST", "EFBIG", "EIO", "EISDIR", "ELOOP", "EMFILE", "ENAMETOOLONG",
        "ENFILE", "ENODEV", "ENOSPC", "ENOTDIR", "ENXIO", "EPERM", "EPIPE", "EROFS", "ESTALE",
        "ETXTBSY",
    )
    if hasattr(errno, name)
)  # fmt: skip
_LONGEST = 80  # characters of a name in a message


def short(name: object, most: int = _LONGEST) -> str:
    """Return a name with its middle left out where it is long, for a message of one line."""
    text, half = str(name), most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def refusal(error: BaseException) -> str | None:
    """Return a message for an ``error`` of the machine, None for a bug of the program."""
    if isinstance(error, BrokenPipeError):
        return "standard output was closed"
    if isinstance(error, OSError) and error.errno is not None and error.errno in _REFUSALS:
        where = f": {short(error.filename)}" if error.filename is not None else ""
        return f"{os.strerror(error.errno)}{where}"
    text = " ".join(str(error).split())
    # Orbax and XLA raise their own errors, with the system's message.
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
        return f"out of memory ({short(text)}); smaller sizes, such as --batch-size, need less"
    return None


def write_whole(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` so that a kill leaves the old content or the new, never a part."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def read_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it is not a regular file, or damaged.
    """
    if not stat.S_ISREG(file.stat().st_mode):  # reading a pipe or a device may never end
        raise UsageError(f"{short(file)} is no regular file")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UsageError(f"{short(file)} is damaged: it is not JSON") from None
