"""Shortens signatures: `Array` and `ArrayLike` instead of their definitions.

The signature of a class is that of its `__init__`, which a metaclass hides from autodoc.
"""

import ast
import inspect
import re
import textwrap
from typing import Any

import jax.typing
import numpy.typing
from sphinx.util.typing import stringify_annotation

ALIASES = {
    stringify_annotation(numpy.typing.ArrayLike, "smart"): "ArrayLike",
    stringify_annotation(numpy.typing.ArrayLike): "ArrayLike",
    stringify_annotation(jax.typing.ArrayLike, "smart"): "ArrayLike",
    stringify_annotation(jax.typing.ArrayLike): "ArrayLike",
}
PATHS = re.compile(
    r"~?\b(?:jaxlib\._jax|jax|jaxtyping|numpy|collections\.abc|typing)\.(?=[A-Z]|ndarray)"
)
ANNOTATED = re.compile(r"Annotated\[Any, (\w+\[\w+, '[^']*'\])\]")
# A default that is a function, as its repr has it: only the name is shown.
FUNCTION = re.compile(r"<(?:PjitFunction of )?<?function ([\w.]+?)(?:\.<locals>\.\w+)?>>?")
CLASS = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
# Every Linen module has these two; Flax documents them.
LINEN = re.compile(
    r"(?:, )?parent: [^=]*= <flax\.linen\.module\._Sentinel object>, name: str \| None = None"
)
HIDDEN = re.compile(r"\(\*args(: Any)?, \*\*kwargs(: Any)?\)")


def shorten(text: str | None) -> str | None:
    """The signature with long unions replaced by their names, and arrays without their module."""
    if text is None:
        return None
    for long, short in ALIASES.items():
        text = text.replace(long, short)
    text = ANNOTATED.sub(r"\1", PATHS.sub("", LINEN.sub("", text)))
    return CLASS.sub(r"\1", FUNCTION.sub(r"\1", text))


def written(method: Any) -> str:
    """The arguments of a method as written in its source, without `self`."""
    function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    assert isinstance(function, ast.FunctionDef)
    del function.args.args[0]
    return f"({ast.unparse(function.args)})"


def process(
    _app: Any, what: str, _name: str, value: Any, _options: Any, signature: str, returns: str
) -> tuple[str | None, str | None]:
    """The signature and return annotation that autodoc shows."""
    if what == "class" and signature and HIDDEN.fullmatch(signature):
        signature = written(value.__init__)
    return shorten(signature), shorten(returns)


def setup(app: Any) -> dict[str, bool]:
    """Connects to autodoc."""
    app.connect("autodoc-process-signature", process)
    return {"parallel_read_safe": True}
