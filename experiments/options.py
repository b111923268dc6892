"""What every study can be told on the command line, and how a preset fills the gaps."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.errors import UsageError

_LARGEST = 3.4e38  # of float32, which models compute in
PRESETS = ("quick", "default", "full")


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Options that all studies share.

    A study subclasses this, adds its own fields and lists in ``preset_values`` what each preset
    means. A field whose default is None is filled from the preset; a value given by the user
    always wins.
    """

    out: Path | None = None
    """Folder for everything the study writes; runs/<study>/<time> when not given."""
    preset: str = "default"
    """How long to take: quick (60 s on two cores), default (5 minutes) or full (three seeds, more
    steps)."""
    seeds: int | None = None
    """How many seeds to average over; one seed is labelled quick in the report."""
    resume: bool = False
    """Go on with the unfinished run in --out, to the same numbers as if it had not stopped."""

    study: ClassVar[str] = ""
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def resolved(self) -> "StudyOptions":
        """Return the options with every None that the preset knows about filled in."""
        check_choice("--preset", self.preset, PRESETS)
        values = self.preset_values.get(self.preset, {})
        filled = {k: v for k, v in values.items() if getattr(self, k) is None}
        options = dataclasses.replace(self, **filled)
        options.check()
        return options

    def check(self) -> None:
        """Raise UsageError where a value makes no sense; subclasses extend it."""
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, float) and not abs(value) <= _LARGEST:
                    raise UsageError(f"{flag(field.name)} {value} must be a finite float32 number")
        check_positive("--seeds", self.seeds)

    def run(self) -> Path:
        """Do the study and return the folder with its results."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")


def flag(name: str) -> str:
    """Return the command-line spelling of a field: ``batch_size`` is ``--batch-size``."""
    return "--" + name.replace("_", "-")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UsageError(f"{name} {value!r} is unknown; choose one of {', '.join(choices)}")


def check_positive(name: str, value: float | None, *, least: float = 1) -> None:
    """Raise UsageError if ``value`` is a number below ``least``."""
    if value is not None and not value >= least:
        raise UsageError(f"{name} {value} is too small; it must be {least} or more")
