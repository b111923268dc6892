"""The settings of a study: options, presets, and their JSON form."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.errors import UsageError
from experiments.files import short

_LARGEST = 3.4e38  # of float32, which models compute in
_MOST = 2**31 - 1  # of int32, which counts steps and sizes
_MOST_SEEDS = 10_000
PRESETS = ("quick", "default", "full")
FROM_PRESET: Any = None  # the default of a field that the preset fills


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Options that all studies share.

    A study subclasses this, adds fields and lists in ``preset_values`` the values of each preset. A
    field with the default FROM_PRESET is filled from there; a value given by the user always takes
    precedence.
    """

    out: Path | None = None
    """Folder for everything the study writes; runs/<study>/<time> when not given."""
    preset: str = "default"
    """How long to take: quick (60 s on two cores), default (5 minutes) or full (three seeds, more
    steps)."""
    seeds: int = FROM_PRESET
    """How many seeds to average over; one seed is labelled quick in the report."""
    resume: bool = False
    """Go on with the unfinished run in --out, to the same numbers as if it had not stopped."""
    mesh: str | None = None
    """Devices to train on, such as data=4,model=2: examples are divided over the one axis, heads
    and widths over the other. One device when not given."""
    fully_sharded: bool = False
    """Divide parameters and moments over the data axis too."""
    coordinator: str | None = None
    """HOST:PORT of the first of several processes, or auto to read it from the cluster."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """Which of them this is, from 0."""

    study: ClassVar[str] = ""
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}  # of fields that are equal in all presets
    # The valid values of a field, and the interval of a number: by default integers are at least 1,
    # others at least 0. A field of many values has at least one.
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    intervals: ClassVar[Mapping[str, str]] = {}
    may_be_empty: ClassVar[tuple[str, ...]] = ()
    each_once: ClassVar[tuple[str, ...]] = ()

    @property
    def question(self) -> str:
        """The question of the study: the first line of its docstring."""
        return (type(self).__doc__ or "").partition("\n")[0]

    def resolved(self) -> typing.Self:
        """Return the options with every None that the preset defines filled in."""
        check_choice("--preset", self.preset, PRESETS)
        values = {**self.defaults, **self.preset_values.get(self.preset, {})}
        filled = {k: v for k, v in values.items() if getattr(self, k) is None}
        options = dataclasses.replace(self, **filled)
        options.check()
        return options

    def check(self) -> None:
        """Raise UsageError if a value is invalid; subclasses extend it."""
        intervals = {"seeds": f"[1, {_MOST_SEEDS}]", "process": "[0, inf)", **self.intervals}
        choices = {"preset": PRESETS, **self.choices}
        for field in dataclasses.fields(self):
            name, values = flag(field.name), getattr(self, field.name)
            many = values if isinstance(values, tuple) else (values,)
            for value in many:
                if isinstance(value, str) and field.name in choices:
                    check_choice(name, value, choices[field.name])
                if isinstance(value, int | float) and not isinstance(value, bool):
                    _check_number(name, value, intervals.get(field.name))
            if not many and field.name not in self.may_be_empty:
                raise UsageError(f"{name} is empty; give at least one")
            if field.name in (*choices, *self.each_once) and len(set(many)) < len(many):
                raise UsageError(f"{name} must name each once")

    def run(self) -> Path:
        """Run the study and return the folder with its results."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")


@dataclasses.dataclass(frozen=True)
class TrainingOptions(StudyOptions):
    """Options of the studies that train models."""

    steps: int = FROM_PRESET
    """Training steps of each model."""
    batch_size: int = FROM_PRESET
    """Examples in a batch: sentences, problems or rows."""
    learning_rate: float = FROM_PRESET
    """The highest learning rate, after the warm-up."""


def from_json(options: StudyOptions, values: Mapping[str, Any]) -> StudyOptions:
    """Return ``options`` with the fields of ``values``, as JSON has them.

    Raises:
        UsageError: a value is not of its field's type.
    """
    hints = typing.get_type_hints(type(options))
    read = {}
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise UsageError(f"{flag(name)} cannot be {value!r}")
        read[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(options, **read)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON is one of the type that a field has."""
    inner = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(_fits(value, kind) for kind in inner)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(v, inner[0]) for v in value)
    if hint is bool:
        return isinstance(value, bool)
    kind = {Path: str, float: (int, float)}.get(hint, hint)
    return isinstance(value, kind) and not isinstance(value, bool)


def flag(name: str) -> str:
    """Return the command-line spelling of a field: ``batch_size`` is ``--batch-size``."""
    return "--" + name.replace("_", "-")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UsageError(f"{name} {short(value)!r} is unknown; choose one of {', '.join(choices)}")


def check_heads(name: str, width: int | None, heads: int | None) -> None:
    """Raise UsageError unless a width divides into heads of an even depth."""
    if width and heads and width % (2 * heads):
        raise UsageError(f"{name} {width} must be an even multiple of --heads {heads}")


def _check_number(name: str, value: float, interval: str | None) -> None:
    """Raise UsageError unless a number lies in an interval such as ``(0, 1]``."""
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        raise UsageError(f"{name} {value} must be a finite float32 number")
    if not abs(value) <= _LARGEST or (isinstance(value, int) and abs(value) > _MOST):
        raise UsageError(f"{name} is too large; it must be {_MOST} or less")
    interval = interval or ("[1, inf)" if isinstance(value, int) else "[0, inf)")
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if above and below:
        return
    if interval[0] == "[" and (interval[-1] == "]" or high == math.inf):
        size, words = ("large", f"{low:g} to {high:g}") if above else ("small", f"{low:g} or more")
        raise UsageError(f"{name} {value} is too {size}; it must be {words}")
    words = "be positive" if interval == "(0, inf)" else f"lie in {interval}"
    raise UsageError(f"{name} {value} must {words}")
