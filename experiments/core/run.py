"""A run folder: where one run of a study keeps its settings, finished cells and results.

    FOLDER/
      run.json          what was asked, by which versions and on which data; when it ran, how long
      run.lock          held by the process that works here, and released when that ends
      cells/NAME.json   one finished piece of work each (a trained model, a timed length)
      checkpoints/NAME  the unfinished model's training state
      results.json      the documented outcome; figures/*.png; report.html

A file is written whole or not at all, so a run that is killed at any moment can be resumed:
finished cells are read back, not repeated. It is resumed only with the versions and the data that
it was started with, so that all its cells are of one kind; and nothing that is damaged is deleted.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.core import files, stop
from experiments.core import lock as locks
from experiments.core.settings import StudyOptions, flag, from_json
from experiments.core.versions import SOURCES, environment, versions
from experiments.errors import UsageError

if TYPE_CHECKING:
    from experiments.report.blocks import Report

SCHEMA = 1
_NOT_SETTINGS = ("out", "resume")


class RunFolder:
    """The folder of one run, new or resumed."""

    def __init__(self, path: Path, options: StudyOptions, record: dict[str, Any]):
        self.path = path
        self.options = options
        self._record = record
        self._begun = time.monotonic()
        self._before = sum(s["seconds"] for s in record["sittings"])
        record["sittings"].append({"started": _now(), "seconds": 0.0})
        self.save_record()
        (path / "cells").mkdir(exist_ok=True)
        _Open.options = dataclasses.replace(options, out=path)

    @classmethod
    def open(cls, options: StudyOptions, data: str | None = None) -> "RunFolder":
        """Make the folder ``options.out`` asks for, or with ``options.resume`` go on with it.

        Args:
            options: the study's settings.
            data: the digest of the data that the run reads, if it reads any.

        Raises:
            UsageError: the folder holds something else, cannot be made, is in use by another
                process, or was started with other versions or other data.
        """
        path, resume = options.out, options.resume
        if path is None:
            stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            path = _unused(Path("runs") / options.study / stamp)
        made = {"versions": versions(), "data": data}
        if not resume:
            _check_vacant(path)
        locks.lock(path)
        try:
            if resume:
                record = _read_record(path)
                _check_same(path, options, record, made)
            else:
                _check_vacant(path)
                record = {"study": options.study, "settings": settings_of(options), **made}
                record["sittings"] = []
            folder = cls(path, options, record)
            if not resume:
                folder.write_results({"cells": []}, finished=False)
            return folder
        except BaseException:
            locks.unlock(path)
            raise

    def __enter__(self) -> "RunFolder":
        stop.check()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An error on its way, a full disk say, is not to be hidden by one from here.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self.save_record()
        locks.unlock(self.path)

    def check_data(self, digest: str) -> None:
        """Raise UsageError if data that the run reads again is not what it was started with."""
        if digest != self._record["data"]:
            raise UsageError(_other_data(self.path, self.options, self._record["data"], digest))

    def conclude(
        self, results: dict[str, Any], build: "Callable[[dict[str, Any], Path], Report]"
    ) -> Path:
        """Write results.json, and the report that ``build`` makes of it; return the folder."""
        from experiments.report.page import write_report  # loads Jinja, which --help need not

        stop.check()
        document = self.write_results(results, finished=True)
        page = write_report(self.path, build(document, self.path), document)
        print(f"report: {page}")
        return self.path

    @property
    def seconds(self) -> float:
        """Time this run has taken so far, over all its sittings."""
        return self._before + time.monotonic() - self._begun

    @property
    def started(self) -> str:
        """When the first sitting began (ISO 8601, with offset)."""
        return self._record["sittings"][0]["started"]

    @property
    def sittings(self) -> int:
        """How many times the run was started or resumed."""
        return len(self._record["sittings"])

    def has(self, name: str) -> bool:
        """Return whether the cell ``name`` is finished."""
        return self._cell(name).exists()

    def cell(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the finished cell ``name``, computing and keeping it if it is not there yet.

        Raises:
            UsageError: the cell is there and damaged.
        """
        stop.check()
        if not self.has(name):
            value = compute()
            cell = {"cell": name, "sha256": _digest(json.dumps(value)), "value": value}
            files.write_whole(self._cell(name), json.dumps(cell))
            done = sorted(file.stem for file in self._cell(name).parent.glob("*.json"))
            self.write_results({"cells": done}, finished=False)
        # Read back, so that a fresh run and a resumed one go on from identical objects.
        return self._read_cell(name)

    def _cell(self, name: str) -> Path:
        return self.path / "cells" / f"{name}.json"

    def _read_cell(self, name: str) -> dict[str, Any]:
        file = self._cell(name)
        cell = files.read_json(file)
        if (
            not isinstance(cell, dict)
            or cell.get("cell") != name
            or not isinstance(cell.get("value"), dict)
            or cell.get("sha256") != _digest(json.dumps(cell["value"]))
        ):
            raise UsageError(
                f"{files.short(file)} is damaged: its content is not what was written; move it "
                "away to compute it anew"
            )
        return cell["value"]

    def checkpoints(self, name: str) -> Path:
        """Return the (absolute) folder for the checkpoints of the cell ``name``."""
        return (self.path / "checkpoints" / name).resolve()

    def drop_checkpoints(self, name: str) -> None:
        """Delete the checkpoints of a cell that is finished."""
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def save_record(self) -> None:
        """Write run.json with the time taken so far."""
        self._record["sittings"][-1]["seconds"] = round(time.monotonic() - self._begun, 2)
        files.write_whole(self.path / "run.json", json.dumps(self._record, indent=2))

    def write_results(self, results: dict[str, Any], *, finished: bool) -> dict[str, Any]:
        """Write results.json: ``results`` under the head that all studies share; return it all."""
        self.save_record()
        document = {
            "schema": SCHEMA,
            "study": self.options.study,
            "status": "finished" if finished else "unfinished",
            "quick": self.options.seeds == 1,
            "settings": self._record["settings"],
            "environment": environment(),
            "started": self.started,
            "sittings": self.sittings,
            "seconds": round(self.seconds, 1),
            "question": self.options.question,
            **results,
        }
        document = finite(document)
        text = json.dumps(document, indent=1, ensure_ascii=False)
        files.write_whole(self.path / "results.json", text)
        return document


class _Open:
    """The run that this process works on, for the command that resumes it."""

    options: StudyOptions | None = None


def resume_command() -> str | None:
    """Return the command that goes on with the run of this process, None before it is begun."""
    options = _Open.options
    if options is None:
        return None
    words = ["python", "-m", "experiments", options.study, "--out", str(options.out), "--resume"]
    return shlex.join(words)


def forget() -> None:
    """Forget the run of an earlier call in this process."""
    _Open.options = None


def resume_options(options: StudyOptions, given: Collection[str]) -> StudyOptions:
    """Return the settings that the run in ``options.out`` was started with, to go on with it.

    Args:
        options: what the command line asks for.
        given: the names of the fields that stand on the command line; each is compared, whatever
            its value.

    Raises:
        UsageError: there is no such run, it is of another study, or a field is given another value
            than the run has.
    """
    if options.out is None:
        raise UsageError("--resume needs the folder of the run: add --out FOLDER")
    record = _read_record(options.out)
    name = files.short(options.out)
    if record["study"] != options.study:
        raise UsageError(f"--resume: {name} is a run of {record['study']}, not of {options.study}")
    settings, asked = record["settings"], settings_of(options)
    if unknown := settings.keys() ^ asked.keys():
        raise UsageError(
            f"--resume: {name} was started by another version of this study: it differs in "
            f"{', '.join(map(flag, sorted(unknown)))}"
        )
    for field in sorted(set(given) & settings.keys()):
        if asked[field] != settings[field]:
            raise UsageError(
                f"--resume: {name} was started with {flag(field)} {_shown(settings[field])}, not "
                f"{_shown(asked[field])}"
            )
    try:
        resumed = from_json(options, settings)
        resumed.check()
    except UsageError as error:
        raise UsageError(f"{files.short(options.out / 'run.json')} is damaged: {error}") from None
    _Open.options = resumed
    return resumed


def settings_of(options: StudyOptions) -> dict[str, Any]:
    """Return the settings of a study as run.json holds them."""
    fields = {k: v for k, v in dataclasses.asdict(options).items() if k not in _NOT_SETTINGS}
    return json.loads(json.dumps(fields, default=str))


def finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as None, which is all that JSON has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def _check_vacant(path: Path) -> None:
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


def _check_same(
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
        raise UsageError(_other_data(path, options, record["data"], now["data"]))


def _other_data(path: Path, options: Any, before: str | None, now: str | None) -> str:
    return (
        f"--data {files.short(options.data)} has changed since {files.short(path)} was started "
        f"with it (digest {str(before)[:12]}, now {str(now)[:12]}); restore it, or start a new run"
    )


def _read_record(path: Path) -> dict[str, Any]:
    """Return run.json, whole and of the right form, or raise UsageError; nothing is changed."""
    file = path / "run.json"
    try:
        record = files.read_json(file)
    except OSError as error:
        raise UsageError(_no_run(path, error)) from None
    sittings = record.get("sittings") if isinstance(record, dict) else None
    if (
        not isinstance(sittings, list)
        or not sittings
        or not all(
            isinstance(s, dict)
            and isinstance(s.get("started"), str)
            and isinstance(s.get("seconds"), int | float)
            for s in sittings
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    return files.short(" ".join(map(str, value)) if isinstance(value, list) else value)


def _unused(path: Path) -> Path:
    for n in range(1, 1000):
        candidate = path if n == 1 else path.with_name(f"{path.name}-{n}")
        if not candidate.exists():
            return candidate
    raise UsageError(f"{path} and its successors exist already; name a folder with --out")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
