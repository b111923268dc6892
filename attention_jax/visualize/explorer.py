"""A page to explore attention on: one file, no server, no network, nothing to install."""

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
from attention_jax.visualize.signs import printable

_MOST = 512  # tokens on an axis
_SCRIPTS = ("weights", "panel", "difference", "page")  # in the order in which they run


@dataclasses.dataclass(frozen=True, repr=False)
class Explorer:
    """A page that `explorer` made. Last in a notebook's cell, it shows itself.

    Attributes:
        html: the whole page, ASCII only.
        title: its title.
        height: of the frame in a notebook, in pixels.
    """

    html: str
    title: str
    height: int = 820

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file, which any browser opens; returns its path."""
        path = Path(path)
        path.write_text(self.html, encoding="ascii")
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own: neither it nor the notebook disturbs the other."""
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
    """A page that shows where every token looks, in every layer and head.

        w(t, s) = softmax_s( logits(t, s) )      the row t of a head: where token t looks
                                                 the column s: who looks at token s

    Layers and heads are picked from lists or from the strip of their entropies; a token shows its
    row or column when it is pointed at, or reached with the arrow keys, and a line says the same
    in words, aloud too. Two models, or one at two times, go side by side, and below them is what
    one looks at more than the other, cell by cell, where the heads that are picked have the same
    tokens. Weights are kept in a byte each, off by less than 1/255 of the largest of their row.

    Args:
        weights: `[N, T, S]` of one layer, `[L, N, T, S]` of several, or a list or mapping of
            layers, each `[*B, N, T, S]`; a `Capture` made with `weights=True` is such a mapping.
        tokens: the T words of the queries; None numbers them. Where layers differ, a mapping from
            patterns of layers' names, `{"encoder/*": source, "*": target}`, the first that matches
            counting.
        key_tokens: the S words of the keys, or a mapping alike; None is `tokens`, where T = S.
        compare: the weights of a second model on the same tokens, in any of these forms; it may
            have other layers and heads.
        names: what the two models are called.
        example: the index of the example to show, where weights have batch axes: an int, or a tuple
            for several axes. A lone array then has them before N.
        title: of the page.
        height: of the frame in a notebook, in pixels.

    Returns:
        An `Explorer`: `.html` is the page, `.save(path)` writes it.

    Raises:
        TypeError: weights that are no floating arrays, tokens that are no list of strings.
        ValueError: shapes, tokens and names that do not fit one another; more than 512 tokens;
            numbers that are not finite or outside [0, 1].

    Example:
        >>> import numpy as np
        >>> weights = np.full((2, 4, 3, 3), 1 / 3)
        >>> page = explorer(weights, ["the", "cat", "sat"], title="An even spread")
        >>> page
        Explorer('An even spread', 0.0... MB)
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
        raise ValueError("names are for two models: give the second as compare")
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
    """A layer as the page reads it; words are kept once in `texts`, and referred to."""
    N, T, S = layer.weights.shape
    if max(T, S) > _MOST:
        raise ValueError(
            f"{layer.name!r} has T = {T} and S = {S}, and a page takes {_MOST} tokens: "
            "cut weights and tokens to a part"
        )
    places = []
    for words in layer_labels(layer, tokens, key_tokens):
        if words not in texts:
            texts.append(words)
        places.append(texts.index(words))
    levels, greatest = pack(layer.weights)
    nats, share = entropy(layer.weights)
    return {
        "name": printable(layer.name),
        "shape": [N, T, S],
        "queries": places[0],
        "keys": places[1],
        "entropy": _numbers(nats),
        "share": _numbers(share),
        "levels": levels,
        "greatest": greatest,
    }


def _numbers(x: np.ndarray) -> list[float | None]:
    return [round(float(value), 4) if np.isfinite(value) else None for value in x]


def _page(title: str, content: dict[str, Any]) -> str:
    """The template filled in, in one pass: what is filled in is not looked at again."""
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
        # No sign in a token can end the element that the data stand in.
        "data": re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", json.dumps(content)),
    }
    template = (folder / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], template)


def _escape(text: str) -> str:
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode("ascii")


def _digest(source: str) -> str:
    """What the page's own policy knows an inline style or script by."""
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
