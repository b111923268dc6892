"""The record of a run, run.json: whether a run may be started or resumed in a folder."""

import os
from pathlib import Path
from typing import Any

from experiments import files
from experiments.core import lock as locks
from experiments.core.settings import StudyOptions
from experiments.core.versions import SOURCES
from experiments.errors import UsageError


def check_vacant(path: Path) -> None:
    """Raise UsageError unless ``path`` is an empty folder or can be made one."""
    name = files.short(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        there = set(os.listdir(path)) - {locks.NAME, "run.json.part"}
    except OSError as error:
        raise UsageError(
            f"--out {name} cannot be made a folder: {os.strerror(error.errno or 0)}"
        ) from None
    if "run.json" in there:
        raise UsageError(
            f"--out {name} already holds a run; add --resume to go on with it, or name another "
            "folder"
        )
    if there:
        raise UsageError(
            f"--out {name} is not empty and holds no run ({files.short(min(there))}); name another "
            "folder"
        )


def check_same(
    path: Path, options: StudyOptions, record: dict[str, Any], now: dict[str, Any]
) -> None:
    """Raise UsageError where the versions or the data are not those that a run was started with."""
    name = files.short(path)
    for package, version in now["versions"].items():
        before = record["versions"].get(package)
        if package == "source" and before != version:
            raise UsageError(
                f"--resume: {name} was started with other source code of {' or '.join(SOURCES)} "
                f"(digest {str(before)[:12]}, now {version[:12]}); use that version, or start a "
                "new run"
            )
        if before != version:
            raise UsageError(
                f"--resume: {name} was started with {package} {before}, not {version}; install "
                "that version, or start a new run"
            )
    if now["data"] != record["data"]:
        raise UsageError(other_data(path, options, record["data"], now["data"]))


def other_data(path: Path, options: Any, before: str | None, now: str | None) -> str:
    """Return the error message for data that has changed, from one digest to another."""
    return (
        f"--data {files.short(options.data)} has changed since {files.short(path)} was started "
        f"with it (digest {str(before)[:12]}, now {str(now)[:12]}); restore it, or start a new run"
    )


def read_record(path: Path) -> dict[str, Any]:
    """Return run.json, whole and of the right form, or raise UsageError; nothing is changed."""
    file = path / "run.json"
    try:
        record = files.read_json(file)
    except OSError as error:
        raise UsageError(_no_run(path, error)) from None
    sessions = record.get("sessions") if isinstance(record, dict) else None
    if (
        not isinstance(sessions, list)
        or not sessions
        or not all(
            isinstance(s, dict)
            and isinstance(s.get("started"), str)
            and isinstance(s.get("seconds"), int | float)
            for s in sessions
        )
        or not isinstance(record.get("study"), str)
        or not all(isinstance(record.get(key), dict) for key in ("settings", "versions"))
        or not isinstance(record.get("data"), str | None)
    ):
        raise UsageError(f"{files.short(file)} is damaged: it does not have the form of a run")
    return record


def _no_run(path: Path, error: OSError) -> str:
    name = files.short(path)
    if not isinstance(error, FileNotFoundError):
        return f"--resume: {name} cannot be read: {os.strerror(error.errno or 0)}"
    if path.is_dir() and set(os.listdir(path)) - {locks.NAME}:
        return f"--resume: {name} holds no run.json, so it cannot be gone on with"
    return f"--resume: {name} holds no run (no run.json); leave --resume out to start one there"
