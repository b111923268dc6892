"""The command line of a study, read before tyro does, for what tyro tells in many words."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from experiments.errors import UsageError
from experiments.options import StudyOptions, check_choice, flag

_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def check_arguments(arguments: Sequence[str], studies: Mapping[str, type[StudyOptions]]) -> None:
    """Look at the study's name, the options' names and their numbers.

    Args:
        arguments: the study's name, then its options.
        studies: the studies by name.

    Raises:
        UsageError: the study or an option is unknown, an option lacks its value, or a value is no
            number where it must be one.

    Example:
        >>> from experiments.studies import STUDIES
        >>> check_arguments(["scaling", "--sead", "3"], STUDIES)
        Traceback (most recent call last):
        experiments.errors.UsageError: option --sead is unknown to scaling; did you mean --seeds?
    """
    check_choice("study", arguments[0], tuple(studies))
    kinds = _options(studies[arguments[0]])
    for name, values in _given(arguments[1:]):
        if name not in kinds:
            raise UsageError(_unknown(name, arguments[0], kinds))
        kind, many = kinds[name]
        if kind is None:
            continue
        if not values and not many:
            raise UsageError(f"{name} needs a value")
        for value in values if many else values[:1]:
            if not _reads(kind, value):
                raise UsageError(f"{name} {value!r} must be {_KINDS[kind]}")


def _options(study: type[StudyOptions]) -> dict[str, tuple[Any, bool]]:
    """Return for each option the type of a value, None without one, and whether it takes many."""
    hints = typing.get_type_hints(study, include_extras=True)
    found: dict[str, tuple[Any, bool]] = dict.fromkeys(("-h", "--help"), (None, False))
    for field in dataclasses.fields(study):
        hint = hints[field.name]
        if tyro.conf.Positional in getattr(hint, "__metadata__", ()):
            continue
        if hint is bool:
            found |= dict.fromkeys((flag(field.name), flag("no_" + field.name)), (None, False))
            continue
        kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
        many = typing.get_origin(hint) is tuple or typing.get_origin(kinds[0]) is tuple
        inner = typing.get_args(kinds[0]) or kinds
        found[flag(field.name)] = (inner[0], many)
    return found


def _given(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with the words after it, those before the first one left out."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--") or word == "-h":
            name, sign, value = word.partition("=")
            found.append((name.replace("_", "-"), [value] if sign else []))
        elif found:
            found[-1][1].append(word)
    return found


def _reads(kind: Any, value: str) -> bool:
    if kind is bool:
        return value in ("True", "False", "None")
    try:
        return kind not in (int, float) or kind(value) is not None
    except ValueError:
        return value == "None"


def _unknown(name: str, study: str, kinds: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, kinds, 1)
    hint = f"did you mean {close[0]}?" if close else f"--help lists those of {study}"
    return f"option {name} is unknown to {study}; {hint}"
