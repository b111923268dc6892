"""Symbols for characters that are not printable, or that a file format forbids."""

import re

# C0 and C1 controls, line and paragraph separators, lone surrogates and noncharacters. XML 1.0
# allows none of the C0 controls but tab, line feed and carriage return, not even escaped.
_NOT_PRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
_SYMBOLS = {"\t": "⇥", "\n": "⏎", "\r": "⏎", "\u2028": "⏎", "\u2029": "⏎", "\x7f": "␡"}


def printable(text: str) -> str:
    r"""Return a text with a symbol in place of each control character.

    Line breaks and tabs become arrows, other C0 controls their Unicode control pictures, and what
    has no picture the replacement character U+FFFD.

    Example:
        >>> printable("a\x00b\n")
        'a␀b⏎'
    """
    return _NOT_PRINTABLE.sub(_symbol, text)


def _symbol(found: re.Match[str]) -> str:
    character = found[0]
    if character < " ":
        return _SYMBOLS.get(character, chr(0x2400 + ord(character)))
    return _SYMBOLS.get(character, "\ufffd")
