"""Completion of the layers' docstrings, so that each argument is described once in the source.

A method omits the description of an argument that its class's `__call__` has, and a layer omits
that of an argument that its base has.
"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping

Entries = dict[str, str]
_ORDER = ("Args", "Returns", "Raises", "Example", "References")
_HEADING = re.compile(rf"^({'|'.join(_ORDER)}):$", re.MULTILINE)


def sections(docstring: str | None) -> dict[str, str]:
    """The text of each section, dedented; the description under the name ""."""
    parts = _HEADING.split(inspect.cleandoc(docstring or ""))
    found = {"": parts[0].strip()}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        found[name] = textwrap.dedent(text.strip("\n")).strip()
    return found


def entries(text: str) -> Entries:
    """The descriptions in a section of arguments, by name, with unchanged line breaks."""
    parts = re.split(r"^(\*{0,2}\w+): ", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def arguments(docstring: str | None) -> Entries:
    """The descriptions of a docstring's arguments, by name."""
    return entries(sections(docstring).get("Args", ""))


def completed(
    docstring: str | None, names: Iterable[str], known: Mapping[str, str], extra: str | None = None
) -> str:
    """Adds the missing descriptions of arguments to a docstring.

    Args:
        docstring: The docstring in the source.
        names: The arguments, in order.
        known: Descriptions of arguments that it omits.
        extra: A flavour's docstring, whose sections follow the body's; its first line is dropped.

    Returns:
        The docstring, dedented.
    """
    found, more = sections(docstring), sections(extra)
    described = {**known, **entries(found.get("Args", "")), **entries(more.get("Args", ""))}
    lines = [
        textwrap.indent(f"{name}: {described[name]}", " " * 4)
        for name in names
        if name in described
    ]
    found["Args"] = textwrap.dedent("\n".join(lines))
    found[""] = "\n\n".join([found[""], *more[""].split("\n\n")[1:]])
    for name in _ORDER[1:]:
        found[name] = "\n".join(part[name] for part in (found, more) if part.get(name))
    shown = [found[""]]
    shown += [f"{name}:\n{textwrap.indent(found[name], ' ' * 4)}" for name in _ORDER if found[name]]
    return "\n\n".join(shown) + "\n"
