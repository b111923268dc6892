"""Checkpoints of a training state, with checksums: a damaged one is never taken for a whole one.

    FOLDER/STEP/state             a pytree of arrays (orbax)
    FOLDER/STEP/checkpoint.json   a record in JSON, and the SHA-256 of every file of the state

A checkpoint is written beside its place and renamed into it, so that a kill leaves a whole one or
none; the two newest are kept.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
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
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(part / "state", state)
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
            with ocp.StandardCheckpointer() as checkpointer:
                return Restored(step, checkpointer.restore(place / "state", abstract), record)
        older = [s for s in _steps(folder) if s < step]
        instead = f"trying the one of step {older[0]}" if older else "starting from step 0"
        say(f"the checkpoint {files.short(place)} is damaged ({fault}): {instead}")
    return None


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
