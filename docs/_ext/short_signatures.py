"""Signatures say `Array` and `ArrayLike`, not what these stand for this year."""

import re
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
PATHS = re.compile(r"~?\b(?:jaxlib\._jax|jax|numpy|collections\.abc|typing)\.(?=[A-Z]|ndarray)")


def shorten(text: str | None) -> str | None:
    """The signature with each long union under its name, and arrays without their module."""
    if text is None:
        return None
    for long, short in ALIASES.items():
        text = text.replace(long, short)
    return PATHS.sub("", text)


def process(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, signature: str, returns: str
) -> tuple[str | None, str | None]:
    """What autodoc shows instead of `signature` and `returns`."""
    return shorten(signature), shorten(returns)


def setup(app: Any) -> dict[str, bool]:
    """Listens to autodoc."""
    app.connect("autodoc-process-signature", process)
    return {"parallel_read_safe": True}
