"""A run folder: the settings, finished cells and results of one run of a study.

    FOLDER/
      run.json          settings, versions and data digest; times of the sessions
      run.lock          held by the process that works here, and released when that ends
      cells/NAME.json   one finished piece of work each (a trained model, a timed length)
      checkpoints/NAME  the training state of a model
      curves/NAME.jsonl its metrics, a line a step
      results.json      the documented outcome; figures/*.png; report.html

Files are written atomically, so that a run that is killed at any moment can be resumed: finished
cells are read, not repeated. It is resumed only with the versions and the data that it was started
with, so that all its cells are comparable. Damaged files are never deleted.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import math
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import files
from experiments.core import lock as locks
from experiments.core import stop
from experiments.core.progress import Progress
from experiments.core.record import check_same, check_vacant, other_data, read_record
from experiments.core.settings import StudyOptions, flag, from_json
from experiments.core.versions import environment, versions
from experiments.errors import UsageError

if TYPE_CHECKING:
    from experiments.core.optim import Recipe
    from experiments.core.train import Task, Trained
    from experiments.report.blocks import Report

SCHEMA = 2
# Settings that may change when a run is resumed: folder and devices.
_PLACE = ("mesh", "fully_sharded", "coordinator", "processes", "process")
_NOT_SETTINGS = ("out", "resume", *_PLACE)


class RunFolder:
    """The folder of one run, new or resumed."""

    def __init__(self, path: Path, options: StudyOptions, total: int, record: dict[str, Any]):
        from experiments.core import mesh

        self.path = path
        self.options = options
        self.mesh = mesh.make(options.mesh)
        self._first = mesh.first()
        self.progress = Progress(total, silent=not self._first)
        self._record = record
        self._begun = time.monotonic()
        self._before = sum(s["seconds"] for s in record["sessions"])
        place = {"mesh": dict(self.mesh.shape), "fully_sharded": options.fully_sharded}
        place["processes"] = mesh.count()
        record["sessions"].append({"started": _now(), "seconds": 0.0, **place})
        self.save_record()
        (path / "cells").mkdir(exist_ok=True)
        _Open.options = dataclasses.replace(options, out=path)

    @classmethod
    def open(cls, options: StudyOptions, total: int = 0, data: str | None = None) -> "RunFolder":
        """Make the folder ``options.out``, or with ``options.resume`` resume its run.

        Args:
            options: the study's settings.
            total: units of work ahead, for the progress.
            data: the digest of the data that the run reads, if it reads any.

        Raises:
            UsageError: the folder holds something else, cannot be made, is in use by another
                process, or was started with other versions or other data.
        """
        from experiments.core import mesh

        mesh.make(options.mesh)  # if there are no such devices, no folder is made
        path = options.out
        if path is None and options.coordinator:
            raise UsageError("several processes need a folder that all of them see: --out FOLDER")
        if path is None:
            stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            path = _unused(Path("runs") / options.study / stamp)
        record: dict[str, Any] = {"settings": settings_of(options), "data": data, "sessions": []}
        try:
            record = _claimed(path, options, data) if mesh.first() else record
        except BaseException:
            locks.unlock(path)
            mesh.shared(False)
            raise
        if not mesh.shared(True):
            raise UsageError(f"--out {path} is refused: see the first process")
        try:
            folder = cls(path, options, total, record)
            if not options.resume:
                folder.write_results({"cells": []}, finished=False)
        except BaseException:
            locks.unlock(path)
            raise
        return folder

    def __enter__(self) -> "RunFolder":
        stop.check()
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.progress.__exit__()
        # An error that is being raised, such as a full disk, must not be replaced by one from here.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self.save_record()
        locks.unlock(self.path)

    def check_data(self, digest: str) -> None:
        """Raise UsageError if the data of the run has changed since it was started."""
        if digest != self._record["data"]:
            raise UsageError(other_data(self.path, self.options, self._record["data"], digest))

    def conclude(
        self, results: dict[str, Any], build: "Callable[[dict[str, Any], Path], Report]"
    ) -> Path:
        """Write results.json, and the report that ``build`` makes of it; return the folder."""
        from experiments.report.page import write_report  # loads Jinja, which --help does not need

        stop.check()
        document = self.write_results(results, finished=True)
        if self._first:
            self.drop_checkpoints()
            page = write_report(self.path, build(document, self.path), document)
            print(f"report: {page}")
        return self.path

    @property
    def seconds(self) -> float:
        """Time this run has taken so far, over all its sessions."""
        return self._before + time.monotonic() - self._begun

    @property
    def started(self) -> str:
        """When the first session began (ISO 8601, with offset)."""
        return self._record["sessions"][0]["started"]

    @property
    def sessions(self) -> int:
        """How many times the run was started or resumed."""
        return len(self._record["sessions"])

    def has(self, name: str) -> bool:
        """Return whether the cell ``name`` is finished."""
        return self._cell(name).exists()

    def cell(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the finished cell ``name``, computing and keeping it if it is not there yet.

        Raises:
            UsageError: the cell is there and damaged.
        """
        from experiments.core import mesh

        stop.check()
        if not mesh.shared(self.has(name)):
            value = compute()
            if self._first:
                cell = {"cell": name, "sha256": _digest(json.dumps(value)), "value": value}
                files.write_whole(self._cell(name), json.dumps(cell))
                done = sorted(file.stem for file in self._cell(name).parent.glob("*.json"))
                self.write_results({"cells": done}, finished=False)
            mesh.barrier(f"cell {name}")
        # Read from the file, so that a fresh run and a resumed one continue with identical objects.
        return self._read_cell(name)

    def trained(
        self, name: str, steps: int, compute: Callable[[], dict[str, Any]], *, keep: bool = False
    ) -> dict[str, Any]:
        """Return the cell of a model that `train` trains for ``steps``, as `cell` does.

        With ``keep`` the trained model stays in memory until the run ends, and `train` returns it.
        """
        if self.has(name):
            self.progress.skip(steps)
        cell = self.cell(name, compute)
        if not keep:
            self.drop_checkpoints(name)
        return cell

    def all_trained(
        self, models: Mapping[str, Sequence[Any]], train: Callable[..., dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the cells of models that train for ``options.steps``, by `trained`.

        Args:
            models: the arguments of ``train`` for each model, by the name of its cell.
            train: ``(options, run, name, *given) -> cell``.
        """
        steps = getattr(self.options, "steps")  # noqa: B009  (a study that trains has them)
        return [
            self.trained(name, steps, functools.partial(train, self.options, self, name, *given))
            for name, given in models.items()
        ]

    def train(self, name: str, task: "Task", recipe: "Recipe") -> "Trained":
        """Train a model for the cell ``name``, or resume it; see `experiments.core.train`."""
        from experiments.core.train import train

        return train(
            task,
            recipe,
            checkpoints=(self.path / "checkpoints" / name).resolve(),
            curves=self.path / "curves" / f"{name}.jsonl",
            progress=self.progress,
            on=self.mesh,
            fully_sharded=self.options.fully_sharded,
        )

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

    def drop_checkpoints(self, name: str = "") -> None:
        """Delete the checkpoints of a cell that is finished, or of all."""
        if self._first:
            shutil.rmtree(self.path / "checkpoints" / name, ignore_errors=True)

    def save_record(self) -> None:
        """Write run.json with the time taken so far."""
        self._record["sessions"][-1]["seconds"] = round(time.monotonic() - self._begun, 2)
        if self._first:
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
            "sessions": self.sessions,
            "seconds": round(self.seconds, 1),
            "question": self.options.question,
            **results,
        }
        document = finite(document)
        text = json.dumps(document, indent=1, ensure_ascii=False)
        if self._first:
            files.write_whole(self.path / "results.json", text)
        return document


def _claimed(path: Path, options: StudyOptions, data: str | None) -> dict[str, Any]:
    """Lock a folder for a run and return its record, old or new."""
    made = {"versions": versions(), "data": data}
    if not options.resume:
        check_vacant(path)
    locks.lock(path)
    if options.resume:
        record = read_record(path)
        check_same(path, options, record, made)
        return record
    check_vacant(path)
    settings = settings_of(options)
    return {"study": options.study, "settings": settings, **made, "sessions": []}


class _Open:
    """The run of this process, for the command that resumes it."""

    options: StudyOptions | None = None


def resume_command() -> str | None:
    """Return the command that resumes the run of this process, None before it is started."""
    options = _Open.options
    if options is None:
        return None
    words = ["python", "-m", "experiments", options.study, "--out", str(options.out), "--resume"]
    for name in _PLACE:
        value = getattr(options, name)
        if value not in (None, False):
            words += [flag(name), *([] if value is True else [str(value)])]
    return shlex.join(words)


def forget() -> None:
    """Reset the run of an earlier call in this process."""
    _Open.options = None


def resume_options(options: StudyOptions, given: Collection[str]) -> StudyOptions:
    """Return the settings that the run in ``options.out`` was started with, to resume it.

    Args:
        options: the options of the command line.
        given: the names of the fields that are given on the command line; each is compared, for any
            value.

    Raises:
        UsageError: there is no such run, it is of another study, or a field is given another value
            than the run has.
    """
    if options.out is None:
        raise UsageError("--resume needs the folder of the run: add --out FOLDER")
    record = read_record(options.out)
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
    """Return ``value`` with NaN and infinities as None, since JSON cannot represent them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


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
