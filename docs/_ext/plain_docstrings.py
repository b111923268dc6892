"""Docstrings are plain text with formulas in it; Sphinx reads reStructuredText.

The docstrings write a shape as `[*B, T, N, H]` and set a formula off by four spaces, because that reads
well in an editor and in `help()`. Here each docstring is turned into what Sphinx expects, before
napoleon looks for its sections:

    `code`                     becomes   ``code``
    a formula set off          becomes   a literal block
    *, |, _ in plain text      are escaped, so that they stand for themselves
"""

import re
from typing import Any

SECTION = re.compile(
    r"^(Args|Arguments|Returns|Raises|Yields|Attributes|Example|Examples|Note|References|Warns):\s*$"
)
LITERAL = re.compile(r"(``.+?``|:\w+:`.+?`|`[^`]+`)")


def inline(text: str) -> str:
    """One piece of running text with its code marked and its other signs escaped."""
    pieces = []
    for piece in LITERAL.split(text):
        if LITERAL.fullmatch(piece):
            single = piece.startswith("`") and not piece.startswith("``")
            pieces.append(f"``{piece[1:-1]}``" if single else piece)
        else:
            pieces.append(re.sub(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", piece))
    return "".join(pieces)


def indent(line: str) -> int:
    """The number of spaces in front, or a large one for an empty line."""
    return len(line) - len(line.lstrip()) if line.strip() else 1 << 30


def join_code(lines: list[str]) -> list[str]:
    """Joins a line with the next one where a `...` runs over the end of the line."""
    joined: list[str] = []
    for line in lines:
        open_code = bool(joined) and joined[-1].count("`") % 2 == 1 and bool(line.strip())
        if open_code:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    return joined


def convert(lines: list[str]) -> list[str]:
    """The docstring's lines as reStructuredText."""
    out: list[str] = []
    section, i = False, 0
    lines = join_code(lines)
    while i < len(lines):
        line = lines[i]
        if SECTION.match(line):
            section = True
        elif line.strip() and indent(line) == 0:
            section = False
        starts = not section and indent(line) >= 2 and line.strip() and (not out or not out[-1].strip())
        if line.lstrip().startswith((">>>", "...")):
            while i < len(lines) and lines[i].strip():  # an example ends at an empty line
                out.append(lines[i])
                i += 1
            continue
        if starts or line.startswith("|"):
            is_table = line.startswith("|")
            announced = any(row.strip() for row in out) and next(
                row for row in reversed(out) if row.strip()
            ).endswith("::")
            if not announced:
                out += ["", "::", ""] if out and out[-1].strip() else ["::", ""]
            while i < len(lines) and (lines[i].startswith("|") if is_table else indent(lines[i]) >= 2):
                out.append("    " + lines[i] if lines[i].strip() else "")
                i += 1
            out.append("")
            continue
        out.append(inline(line))
        i += 1
    return out


def process(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Rewrites `lines` in place, as autodoc asks of its listeners."""
    lines[:] = convert(lines)


def setup(app: Any) -> dict[str, bool]:
    """Listens before napoleon does (its priority is 500)."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True}
