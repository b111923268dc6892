"""An interactive page of attention weights, in one HTML file without external resources."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax._core.checks import check_count
from attention_jax.visualize.layers import (
    Example,
    Layer,
    Tokens,
    entropy,
    layer_labels,
    read_layers,
)
from attention_jax.visualize.packing import pack
from attention_jax.visualize.symbols import printable

_MOST = 512  # tokens on an axis
_SCRIPTS = ("weights", "panel", "difference", "page")  # in order of execution


@dataclasses.dataclass(frozen=True, repr=False)
class Explorer:
    """The result of `explorer`; a notebook displays it as the last value of a cell.

    Attributes:
        html: the page, ASCII only.
        title: the title.
        height: height of the frame in a notebook, in pixels.
    """

    html: str
    title: str
    height: int = 820

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file; returns its path."""
        path = Path(path)
        path.write_text(self.html, encoding="ascii")
        return path

    def _repr_html_(self) -> str:
        """The page in an iframe, isolated from the notebook."""
        return (
            f'<iframe title="{_escape(printable(self.title))}" sandbox="allow-scripts" '
            f'style="width: 100%; height: {self.height}px; border: 0" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Explorer({self.title!r}, {len(self.html) / 1e6:.2f} MB)"


def explorer(
    weights: Any,
    tokens: Tokens = None,
    key_tokens: Tokens = None,
    *,
    compare: Any = None,
    names: Sequence[str] = ("A", "B"),
    example: Example = None,
    title: str = "Attention",
    height: int = 820,
) -> Explorer:
    """An interactive page of the attention weights of every layer and head.

        w(t, s) = softmax_s( logits(t, s) )      row t: the keys that token t attends to
                                                 column s: the queries that attend to token s

    Layers and heads are selected from lists or by their entropies. Pointing at a token, or moving
    to it with the arrow keys, shows its row or column, also as text for screen readers. Two models
    are shown side by side, and, if the selected heads have the same tokens, their difference in a
    third panel. Weights are stored in one byte each, with an error below 1/255 of the largest in
    the row.

    Args:
        weights: `[N, T, S]` of one layer, `[L, N, T, S]` of several, or a list or mapping of
            layers, each `[*B, N, T, S]`; a `Capture` made with `weights=True` is such a mapping.
        tokens: T labels of the queries, by default their indices; for layers with different tokens,
            a mapping from patterns of layer names, `{"encoder/*": source, "*": target}`, of which
            the first match counts.
        key_tokens: S labels of the keys, or such a mapping; by default `tokens` if T = S.
        compare: the weights of a second model on the same tokens, in any of these forms; layers
            and heads may differ.
        names: names of the two models.
        example: index of the example to show, for weights with batch axes: an int, or a tuple for
            several axes. A single array has them before N.
        title: title of the page.
        height: height of the frame in a notebook, in pixels.

    Returns:
        An `Explorer`: `.html` is the page, `.save(path)` writes it.

    Raises:
        TypeError: weights that are not floating arrays, tokens that are not a list of strings.
        ValueError: shapes, tokens and names that do not match; more than 512 tokens; numbers not
            finite or outside [0, 1].

    Example:
        >>> import numpy as np
        >>> weights = np.full((2, 4, 3, 3), 1 / 3)
        >>> page = explorer(weights, ["the", "cat", "sat"], title="Uniform weights")
        >>> page
        Explorer('Uniform weights', 0.0... MB)
        >>> page.save("attention.html")  # doctest: +SKIP
        PosixPath('attention.html')

    References:
        Vig 2019, "A Multiscale Visualization of Attention in the Transformer Model",
        arXiv:1906.05714, §2.1 (the attention-head view).
    """
    check_count("height", height, 1)
    if not isinstance(title, str):
        raise TypeError(f"title must be a string, got {type(title).__name__}")
    models = [read_layers("weights", weights, example)]
    if compare is not None:
        models.append(read_layers("compare", compare, example))
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise ValueError(f"names must be two strings, got {names!r}")
    if len(models) == 1 and tuple(names) != ("A", "B"):
        raise ValueError("names needs two models: give the second as compare")
    texts: list[list[str]] = []
    content = {
        "models": [
            {
                "name": printable(name) if len(models) == 2 else "",
                "layers": [_layer(layer, tokens, key_tokens, texts) for layer in layers],
            }
            for name, layers in zip(names, models, strict=False)
        ],
        "texts": texts,
    }
    return Explorer(_page(title, content), title, height)


def _layer(
    layer: Layer, tokens: Tokens, key_tokens: Tokens, texts: list[list[str]]
) -> dict[str, Any]:
    """A layer as JSON; tokens are stored once in `texts`, and referred to by index."""
    N, T, S = layer.weights.shape
    if max(T, S) > _MOST:
        raise ValueError(
            f"{layer.name!r} has T = {T} and S = {S}, and a page takes {_MOST} tokens: "
            "select a part of weights and tokens"
        )
    indices = []
    for words in layer_labels(layer, tokens, key_tokens):
        if words not in texts:
            texts.append(words)
        indices.append(texts.index(words))
    levels, greatest = pack(layer.weights)
    nats, share = entropy(layer.weights)
    return {
        "name": printable(layer.name),
        "shape": [N, T, S],
        "queries": indices[0],
        "keys": indices[1],
        "entropy": _numbers(nats),
        "share": _numbers(share),
        "levels": levels,
        "greatest": greatest,
    }


def _numbers(x: np.ndarray) -> list[float | None]:
    return [round(float(value), 4) if np.isfinite(value) else None for value in x]


def _page(title: str, content: dict[str, Any]) -> str:
    """Fills the template in one pass, so that values are not substituted again."""
    folder = files("attention_jax.visualize") / "page"
    style = (folder / "page.css").read_text("utf-8")
    sources = [(folder / f"{name}.js").read_text("utf-8") for name in _SCRIPTS]
    script = "\n".join(['"use strict";', "{", *sources, "}"])
    parts = {
        "title": _escape(printable(title)),
        "policy": (
            "default-src 'none'; base-uri 'none'; form-action 'none'; "
            f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
        ),
        "style": style,
        "script": script,
        # escaped, so that no token ends the script element
        "data": re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(content)),
    }
    template = (folder / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], template)


def _escape(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _digest(source: str) -> str:
    """The hash of an inline style or script for the content security policy."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
