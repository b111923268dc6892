"""Argument descriptions that several functions share are written once."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

_Documented = TypeVar("_Documented")
_ENTRY = re.compile(r"    (\*{0,2}\w+)(?: \(.*?\))?:")
_BEFORE = re.compile(r"(Returns|Yields|Raises|Example|Examples|Note|References):$", re.MULTILINE)


def arguments_of(*sources: Any, **renamed: str) -> Callable[[_Documented], _Documented]:
    """Decorator: completes the docstring's `Args` with the entries of other docstrings.

    A parameter that the decorated function or class does not describe gets the entry of the first
    source that describes a parameter of its name. Entries follow the order of the signature, which
    does not change. Where docstrings are stripped (`python -OO`) nothing happens.

    A docstring that describes some parameters itself needs `# noqa: D417`, since linters read the
    source; a docstring without `Args` does not.

    Args:
        *sources: functions or classes with an `Args` section in their docstrings.
        **renamed: for a parameter, the name under which the sources describe it.

    Example:
        >>> def scale(x, factor):
        ...     '''Multiplies.
        ...
        ...     Args:
        ...         x: an array.
        ...         factor: a number.
        ...     '''
        >>> @arguments_of(scale)
        ... def shrink(x, *, factor):
        ...     '''Divides.'''
        >>> print(shrink.__doc__)
        Divides.
        <BLANKLINE>
        Args:
            x: an array.
            factor: a number.
    """

    def decorate(target: _Documented) -> _Documented:
        if target.__doc__ is None:
            return target
        summary, own, rest = _split(target.__doc__)
        known: dict[str, str] = {}
        for source in sources:
            known = {**_split(source.__doc__ or "")[1], **known}
        function: Any = target.__init__ if isinstance(target, type) else target
        entries = []
        for name, parameter in inspect.signature(function).parameters.items():
            stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
            shown = stars.get(parameter.kind, "") + name
            if shown in own:
                entries.append(own.pop(shown))
            elif (described := stars.get(parameter.kind, "") + renamed.get(name, name)) in known:
                entries.append(known[described].replace(described, shown, 1))
        arguments = "\n".join(["Args:", *entries, *own.values()]) if entries or own else ""
        target.__doc__ = "\n\n".join(part for part in (summary, arguments, rest) if part)
        return target

    return decorate


def _split(docstring: str) -> tuple[str, dict[str, str], str]:
    """The text before the arguments, the entries of `Args` by name, and the sections after it."""
    text = inspect.cleandoc(docstring)
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    if section is None:
        at = match.start() if (match := _BEFORE.search(text)) else len(text)
        return text[:at].rstrip(), {}, text[at:]
    entries: dict[str, str] = {}
    name = ""
    for line in section[1].rstrip().splitlines():
        if match := _ENTRY.match(line):
            name = match[1]
        entries[name] = f"{entries[name]}\n{line}" if name in entries else line
    entries = {name: entry.rstrip() for name, entry in entries.items()}
    return text[: section.start()].rstrip(), entries, text[section.end() :].strip("\n")
