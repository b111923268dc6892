"""How the docs read a docstring: what stands in it must come out as it was meant."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[1] / "docs" / "_ext" / "plain_docstrings.py"


def convert(text: str) -> str:
    spec = importlib.util.spec_from_file_location("plain_docstrings", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n".join(module.convert(text.splitlines())).strip()


@pytest.mark.parametrize(
    ("plain", "rst"),
    [
        ("`[*B, T]` and *B, |x|, x_", r"``[*B, T]`` and \*B, \|x\|, x\_"),
        ("already ``literal``, :class:`Mask`", "already ``literal``, :class:`Mask`"),
        ("over `two\n    lines` here", "over ``two lines`` here"),
        ("* a point\n  of `two` lines", "* a point\n  of ``two`` lines"),
        ("Sum.\n\n    out = *B\n\nMore.", "Sum.\n\n\n::\n\n    out = *B\n\nMore."),
        ("So::\n\n    out = *B", "So::\n\n    out = *B"),
        ("| a | b |\n|---|---|", "::\n\n    | a | b |\n    |---|---|"),
        ("Args:\n    x: a *B.\n\n    y: b.", "Args:\n    x: a \\*B.\n\n    y: b."),
        ("Example:\n    >>> f(*x)\n    `3`", "Example:\n    >>> f(*x)\n    `3`"),
    ],
)
def test_plain_text_becomes_what_sphinx_expects(plain, rst):
    assert convert(plain) == rst
