"""Converts plain-text docstrings with formulas to reStructuredText.

Docstrings write a shape as `[*B, T, N, H]` and indent a formula by four spaces, because that is
readable in an editor and in `help()`. This extension converts each docstring before napoleon parses
its sections:

    `code`                     becomes   ``code``
    an indented formula        becomes   a literal block
    *, |, _ in plain text      are escaped
"""

import re
import textwrap
from collections.abc import Callable
from typing import Any

SECTION = re.compile(
    r"^(Args|Arguments|Returns|Raises|Yields|Attributes|Example|Examples|Note|References|Warns):\s*$"
)
BULLET = re.compile(r"^\s*[*-] ")
LITERAL = re.compile(r"(``.+?``|:\w+:`.+?`|`[^`]+`)")


def inline(text: str) -> str:
    """A line of text with code marked and special characters escaped."""
    bullet = BULLET.match(text)
    pieces = [bullet[0]] if bullet else []
    for piece in LITERAL.split(text[len("".join(pieces)) :]):
        if LITERAL.fullmatch(piece):
            single = piece.startswith("`") and not piece.startswith("``")
            pieces.append(f"``{piece[1:-1]}``" if single else piece)
        else:
            pieces.append(re.sub(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", piece))
    return "".join(pieces)


def join_code(lines: list[str]) -> list[str]:
    """Joins a line with the next one where a `...` runs over the end of the line."""
    joined: list[str] = []
    for line in lines:
        open_code = bool(joined) and joined[-1].count("`") % 2 == 1 and bool(line.strip())
        if open_code and not line.lstrip().startswith((">>>", "...")):
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    return joined


def convert(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    lines, out, section = join_code(lines), [""], False
    while lines:
        line = lines.pop(0)
        if not indented(line):
            section = bool(SECTION.match(line))
        if line.lstrip().startswith(">>>"):  # an example is unchanged, up to an empty line
            out.append(line)
            while lines and lines[0].strip():
                out.append(lines.pop(0))
        elif is_table(line) or (line[:2] == "  " and not section and not out[-1].strip()):
            belongs = is_table if is_table(line) else indented
            out += literal_block([line, *take(lines, belongs)], announced=announced(out))
        else:
            out.append(inline(line))
    return out[1:]


def is_table(line: str) -> bool:
    """Whether the line is a row of a Markdown table."""
    return line.startswith("|")


def indented(line: str) -> bool:
    """Whether the line is indented, or empty."""
    return line.startswith("  ") or not line.strip()


def take(lines: list[str], belongs: Callable[[str], bool]) -> list[str]:
    """Removes the leading lines for which `belongs` is true, and returns them."""
    taken = []
    while lines and belongs(lines[0]):
        taken.append(lines.pop(0))
    return taken


def announced(out: list[str]) -> bool:
    """Whether the last text before here ends with the two colons of a literal block."""
    text = [line for line in out if line.strip()]
    return bool(text) and text[-1].endswith("::")


def literal_block(lines: list[str], announced: bool) -> list[str]:
    """The lines as a literal block, with the two colons that start one."""
    shown = textwrap.indent(textwrap.dedent("\n".join(lines)), "    ").splitlines()
    return [*([] if announced else ["", "::", ""]), *shown, ""]


def process(_app: Any, _what: str, _name: str, _obj: Any, _opts: Any, lines: list[str]) -> None:
    """Rewrites `lines` in place, as autodoc requires."""
    lines[:] = convert(lines)


def setup(app: Any) -> dict[str, bool]:
    """Connects with a priority before napoleon's, 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True}
