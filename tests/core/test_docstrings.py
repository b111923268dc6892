"""Descriptions of arguments are copied between docstrings."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import attention_jax
from attention_jax._core.docstrings import arguments_of


def source(a, *inputs, b=0, **options):
    """Does a thing.

    More of it.

    Args:
        a: the first,
            on two lines: with a colon.
        *inputs: arrays, `{"x": 1}`.
        b (int): a number.

        **options: others.

    Returns:
        Nothing.
    """


def test_missing_entries_are_inserted_in_the_order_of_the_signature():
    @arguments_of(source)
    def target(b, own, *inputs, a, **options):
        """Does another.

        Formula:

            b = 1

        Args:
            own: its own.

        Returns:
            b: not an argument.

        Example:
            >>> 1
            1
        """

    assert target.__doc__ == "\n".join(
        [
            "Does another.",
            "",
            "Formula:",
            "",
            "    b = 1",
            "",
            "Args:",
            "    b (int): a number.",
            "    own: its own.",
            '    *inputs: arrays, `{"x": 1}`.',
            "    a: the first,",
            "        on two lines: with a colon.",
            "    **options: others.",
            "",
            "Returns:",
            "    b: not an argument.",
            "",
            "Example:",
            "    >>> 1",
            "    1",
        ]
    )
    assert str(inspect.signature(target)) == "(b, own, *inputs, a, **options)"
    assert "the first," in inspect.getdoc(target)


@pytest.mark.parametrize("rest", ["", "\n\nRaises:\n    ValueError: never.", "\n\nNote:\n    Hm."])
def test_a_docstring_without_arguments_gets_them_before_its_other_sections(rest):
    def target(b):
        pass

    target.__doc__ = f"One line.{rest}"
    arguments_of(source)(target)
    assert target.__doc__ == f"One line.\n\nArgs:\n    b (int): a number.{rest}"


def test_own_entries_win_and_the_first_source_wins():
    def other(a, b):
        """Other.

        Args:
            a: another a.
            b: another b.
        """

    @arguments_of(other, source)
    def target(a, b, *inputs):
        """One.

        Args:
            b: its own.
        """

    entries = target.__doc__.split("Args:\n")[1].splitlines()
    assert entries == ["    a: another a.", "    b: its own.", '    *inputs: arrays, `{"x": 1}`.']


def test_entries_are_copied_under_another_name_and_into_classes():
    @arguments_of(source, left="b", right="b")
    class Pair:
        """Two numbers."""

        def __init__(self, left, right):
            pass

    assert Pair.__doc__.endswith("Args:\n    left (int): a number.\n    right (int): a number.")


def test_nothing_is_copied_from_or_into_stripped_docstrings():
    def target(a):
        pass

    assert arguments_of(source)(target) is target
    assert target.__doc__ is None
    target.__doc__ = "One."
    arguments_of(lambda a: None)(target)
    assert target.__doc__ == "One."


def test_the_library_imports_without_docstrings():
    program = "import attention_jax as aj; aj.diagnostics.capture; print(aj.attend.__doc__)"
    shown = subprocess.run(
        [sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True
    )
    assert shown.stdout == "None\n"


def functions():
    """All functions and methods but those of layer bodies, which the flavours complete."""
    for info in pkgutil.walk_packages(attention_jax.__path__, "attention_jax."):
        if info.name.startswith("attention_jax.layers"):
            continue
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            members = vars(value).values() if inspect.isclass(value) else ()
            for found in (value, *members):
                if inspect.isfunction(found) and found.__module__ == info.name:
                    yield found


def test_a_section_of_arguments_describes_every_parameter():
    missing = []
    for function in functions():
        text = inspect.cleandoc(function.__doc__ or "")
        if "\nArgs:\n" not in text:
            continue
        for name in inspect.signature(function).parameters:
            if name not in ("self", "cls") and not name.startswith("_"):
                section = text.split("\nArgs:\n")[1]
                if not any(f"    {stars}{name}" in section for stars in ("", "*", "**")):
                    missing.append(f"{function.__module__}.{function.__qualname__}: {name}")
    assert missing == []
