"""A run folder: where one run of a study keeps its settings, finished cells and results.

    FOLDER/
      run.json          what was asked, when it ran and for how long (all sittings of it)
      cells/NAME.json   one finished piece of work each (a trained model, a timed length)
      checkpoints/NAME  the unfinished model's training state (orbax)
      results.json      the documented outcome; figures/*.png; report.html

A cell is written whole or not at all (a temporary file, then a rename), so a run that is killed
at any moment can be taken up again: finished cells are read back, not repeated.
"""

import dataclasses
import datetime
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.errors import UsageError
from experiments.options import StudyOptions, flag

if TYPE_CHECKING:
    from experiments.report.blocks import Report

SCHEMA = 1
_NOT_SETTINGS = ("out", "resume")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sacrebleu")


class RunFolder:
    """The folder of one run, opened anew or taken up again."""

    def __init__(self, path: Path, options: StudyOptions, record: dict[str, Any]):
        self.path = path
        self.options = options
        self._record = record
        self._begun = time.monotonic()
        self._before = sum(s["seconds"] for s in record["sittings"])
        record["sittings"].append({"started": _now(), "seconds": 0.0})
        self.save_record()

    @classmethod
    def open(cls, options: StudyOptions) -> "RunFolder":
        """Make the folder ``options.out`` asks for, or with ``options.resume`` go on with it.

        Raises:
            UsageError: the folder already holds a run, or cannot be made.
        """
        path = options.out
        if options.resume and path is not None:
            return cls(path, options, _read_record(path))
        if path is None:
            stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            path = _unused(Path("runs") / options.study / stamp)
        elif (path / "run.json").exists():
            raise UsageError(
                f"--out {path} already holds a run; add --resume to go on with it, or name another "
                "folder"
            )
        try:
            (path / "cells").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {path} cannot be made a folder: {error.strerror}") from None
        settings = _settings(options)
        return cls(path, options, {"study": options.study, "settings": settings, "sittings": []})

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.save_record()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            again = f"python -m experiments {self.options.study} --out {self.path} --resume"
            print(f"What was finished is kept; go on with: {again}", file=sys.stderr)

    def conclude(
        self, results: dict[str, Any], build: "Callable[[dict[str, Any], Path], Report]"
    ) -> Path:
        """Write results.json, and the report that ``build`` makes of it; return the folder."""
        from experiments.report.page import write_report  # loads Jinja, which --help need not

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
        """How many times the run was started or taken up."""
        return len(self._record["sittings"])

    def has(self, name: str) -> bool:
        """Return whether the cell ``name`` is finished."""
        return (self.path / "cells" / f"{name}.json").exists()

    def cell(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the finished cell ``name``, computing and keeping it if it is not there yet."""
        file = self.path / "cells" / f"{name}.json"
        if self.has(name):
            return json.loads(file.read_text())
        value = compute()
        write_whole(file, json.dumps(value))
        self.save_record()
        # Read back, so that a fresh run and a resumed one go on from identical objects.
        return json.loads(file.read_text())

    def checkpoints(self, name: str) -> Path:
        """Return the (absolute) folder for the checkpoints of the cell ``name``."""
        return (self.path / "checkpoints" / name).resolve()

    def drop_checkpoints(self, name: str) -> None:
        """Delete the checkpoints of a cell that is finished."""
        shutil.rmtree(self.checkpoints(name), ignore_errors=True)

    def save_record(self) -> None:
        """Write run.json with the time taken so far."""
        self._record["sittings"][-1]["seconds"] = round(time.monotonic() - self._begun, 2)
        write_whole(self.path / "run.json", json.dumps(self._record, indent=2))

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
            **results,
        }
        document = finite(document)
        write_whole(self.path / "results.json", json.dumps(document, indent=1, ensure_ascii=False))
        return document


def taken_up(options: StudyOptions) -> StudyOptions:
    """Return the settings that the run in ``options.out`` was started with, to go on with it.

    Raises:
        UsageError: there is no such run, it is of another study, or ``options`` gives a setting
            another value than the run has.
    """
    if options.out is None:
        raise UsageError("--resume needs the folder of the run: add --out FOLDER")
    record = _read_record(options.out)
    if record["study"] != options.study:
        raise UsageError(
            f"--resume: {options.out} is a run of {record['study']}, not of {options.study}"
        )
    settings = record["settings"]
    asked = _settings(options)
    for field in dataclasses.fields(options):
        if field.name in _NOT_SETTINGS or getattr(options, field.name) == field.default:
            continue
        if asked[field.name] != settings[field.name]:
            raise UsageError(
                f"--resume: {options.out} was started with {flag(field.name)} "
                f"{_shown(settings[field.name])}, not {_shown(asked[field.name])}"
            )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    return dataclasses.replace(options, **values)


def environment() -> dict[str, Any]:
    """Return versions and device: what the numbers of a run depend on besides its settings."""
    import jax

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    try:
        versions["attention_jax"] = metadata.version("attention_jax")
    except metadata.PackageNotFoundError:
        versions["attention_jax"] = "not installed (run from its folder)"
    device = jax.devices()[0]
    return {
        "versions": versions,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
        "system": platform.platform(),
    }


def finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as None, which is all that JSON has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def write_whole(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` so that a kill leaves the old content or the new, never a part."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, file)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "run.json").read_text())
    except OSError:
        raise UsageError(
            f"--resume: {path} holds no run (no run.json); leave --resume out to start one there"
        ) from None


def _settings(options: StudyOptions) -> dict[str, Any]:
    fields = {k: v for k, v in dataclasses.asdict(options).items() if k not in _NOT_SETTINGS}
    return json.loads(json.dumps(fields, default=str))


def _shown(value: Any) -> str:
    return " ".join(str(v) for v in value) if isinstance(value, list) else str(value)


def _unused(path: Path) -> Path:
    for n in range(1, 1000):
        candidate = path if n == 1 else path.with_name(f"{path.name}-{n}")
        if not candidate.exists():
            return candidate
    raise UsageError(f"{path} and its successors exist already; name a folder with --out")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
