"""Checks of a study's command line before tyro parses it, with shorter error messages."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from experiments.core.settings import StudyOptions, check_choice, flag
from experiments.errors import UsageError
from experiments.files import short

_KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def check_arguments(arguments: Sequence[str], studies: Mapping[str, type[StudyOptions]]) -> None:
    """Check the study's name, the options' names and their numbers.

    Args:
        arguments: the study's name, then its options.
        studies: the studies by name.

    Raises:
        UsageError: the study or an option is unknown, an option lacks its value, or a value is not
            a number but must be one.

    Example:
        >>> from experiments.studies import STUDIES
        >>> check_arguments(["scaling", "--sead", "3"], STUDIES)
        Traceback (most recent call last):
        experiments.errors.UsageError: option --sead is unknown to scaling; did you mean --seeds?
    """
    for word in arguments:
        if "\0" in word or any("\ud800" <= sign <= "\udfff" for sign in word):
            raise UsageError(f"{short(ascii(word))} is not text in the encoding of this system")
    check_choice("study", arguments[0], tuple(studies))
    kinds = _options(studies[arguments[0]])
    if "" in arguments:
        raise UsageError(
            f"{arguments[max(arguments.index('') - 1, 0)]} needs a value that is not empty"
        )
    for name, values in _given(arguments[1:]):
        if "" in values:
            raise UsageError(f"{name} needs a value that is not empty")
        if name not in kinds:
            raise UsageError(_unknown(name, arguments[0], kinds))
        kind, many = kinds[name]
        if kind is None:
            continue
        if not values and not many:
            raise UsageError(f"{name} needs a value")
        for value in values if many else values[:1]:
            if not _reads(kind, value):
                raise UsageError(f"{name} {short(value)!r} must be {_KINDS[kind]}")


def given(arguments: Sequence[str], options: StudyOptions) -> set[str]:
    """Return the names of the fields of ``options`` that are given on the command line."""
    words = {name.removeprefix("--").replace("-", "_") for name, _ in _given(arguments[1:])}
    words |= {word.removeprefix("no_") for word in words}
    hints = typing.get_type_hints(type(options), include_extras=True)
    positional = {n for n in hints if _positional(hints[n]) and getattr(options, n) is not None}
    return positional | {f.name for f in dataclasses.fields(options) if f.name in words}


def _positional(hint: Any) -> bool:
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def _options(study: type[StudyOptions]) -> dict[str, tuple[Any, bool]]:
    """Return for each option the type of a value, None without one, and whether it takes many."""
    hints = typing.get_type_hints(study, include_extras=True)
    found: dict[str, tuple[Any, bool]] = dict.fromkeys(("-h", "--help"), (None, False))
    for field in dataclasses.fields(study):
        hint = hints[field.name]
        if _positional(hint):
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
    """Return each option with the words after it, without those before the first option."""
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
    return f"option {short(name)} is unknown to {study}; {hint}"
