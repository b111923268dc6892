"""Checkpoints of a training state, with checksums: a damaged one is never taken for a whole one.

    FOLDER/STEP/state             a pytree of arrays (orbax)
    FOLDER/STEP/checkpoint.json   a record in JSON, and the SHA-256 of every file of the state

A checkpoint is written beside its place and renamed into it, so that a kill leaves a whole one or
none; the two newest are kept.
"""

import contextlib
import functools
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from experiments.core import files

_KEPT = 2
_RECORD = "checkpoint.json"


class Restored(NamedTuple):
    """A checkpoint that was read: the step it was saved at, the state, and the record beside it."""

    step: int
    state: Any
    record: dict[str, Any]


def save(folder: Path, step: int, state: Any, record: dict[str, Any]) -> None:
    """Save ``state`` and ``record`` as the checkpoint of ``step``, and drop all but the newest."""
    place, part = folder / str(step), folder / f"{step}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        with _quiet(), _checkpointer() as checkpointer:
            checkpointer.save(part / "state", args=ocp.args.PyTreeSave(state))
        text = json.dumps(record)
        content = {"step": step, "sha256": _digest(text.encode()), "record": record}
        content["files"] = _digests(part / "state")
        files.write_whole(part / _RECORD, json.dumps(content))
        if place.exists():  # a damaged one, which was trained past again
            shutil.rmtree(place)
        part.rename(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in _steps(folder)[_KEPT:]:
        shutil.rmtree(folder / str(old), ignore_errors=True)


def restore(folder: Path, like: Any, say: Callable[[str], None]) -> Restored | None:
    """Return the newest whole checkpoint, None without one.

    Args:
        folder: where `save` put them.
        like: a state of the same structure, shapes and dtypes.
        say: is called with a line for each checkpoint that is damaged; it is left as it is.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    for step in _steps(folder):
        place = folder / str(step)
        fault = _fault(place)
        if fault is None:
            record = json.loads((place / _RECORD).read_text(encoding="utf-8"))["record"]
            arguments = ocp.args.PyTreeRestore(
                abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
            )
            with _quiet(), _checkpointer() as checkpointer:
                state = checkpointer.restore(place / "state", args=arguments)
            return Restored(step, state, record)
        older = [s for s in _steps(folder) if s < step]
        instead = f"trying the one of step {older[0]}" if older else "starting from step 0"
        say(f"the checkpoint {files.short(place)} is damaged ({fault}): {instead}")
    return None


def _checkpointer() -> ocp.Checkpointer:
    # Merging OCDBT files looks for them by a pattern, which a bracket in a folder's name breaks.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))


@functools.cache
def _drop_late_errors() -> None:
    """Leave out what tensorstore's other writes report once one has failed and ended their loop.

    The failure itself is raised; the others would be printed as tracebacks from their own threads.
    """
    printed, ignored = sys.excepthook, sys.unraisablehook

    def late(error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"

    sys.excepthook = lambda kind, error, trace: late(error) or printed(kind, error, trace)
    sys.unraisablehook = lambda found: late(found.exc_value) or ignored(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what orbax logs of an error, a full disk say, before it raises it."""
    _drop_late_errors()
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def _steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(path.name) for path in found if path.name.isdigit()), reverse=True)


def _fault(place: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None where they are what was written."""
    try:
        content = files.read_json(place / _RECORD)
        wanted = content["files"]
        if content["sha256"] != _digest(json.dumps(content["record"]).encode()):
            return f"{_RECORD} has changed"
    except (OSError, ValueError, KeyError, TypeError):
        return f"no whole {_RECORD}"
    there = _digests(place / "state")
    changed = sorted(
        name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)
    )
    return f"state/{changed[0]} has changed" if changed else None


def _digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by its path in it."""
    found = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): _digest(file.read_bytes()) for file in found}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
