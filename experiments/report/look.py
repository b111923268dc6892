"""The style and fonts of all figures, and the figure of alignments."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import font_manager, rc_context
from matplotlib.figure import Figure

from attention_jax.visualize.symbols import printable

INK, SOFT, PALE = "#3b4149", "#6b7280", "#9aa1a9"
_LOOK = {
    "font.family": "sans-serif", "font.size": 9,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelcolor": INK, "axes.edgecolor": PALE,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e7e9ec", "grid.linewidth": 0.8,
    **{f"{axis}tick.color": INK for axis in "xy"},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round", "lines.markersize": 4,
    "legend.frameon": False, "savefig.dpi": 150,
    # A dollar sign in a name or in a word of the data must not start a formula.
    "text.parse_math": False, "text.usetex": False,
}  # fmt: skip
# DejaVu comes with matplotlib; the others are tried for signs it lacks (Chinese, say).
_FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "SimHei", "Arial Unicode MS",
)  # fmt: skip


@contextlib.contextmanager
def look(**settings: Any) -> Iterator[None]:
    """The context in which every figure is drawn; ``settings`` add to matplotlib's.

    Characters without a glyph give no warning: `drawable` detects them, and HTML is used.
    """
    families: Any = {"font.sans-serif": list(_fonts())}
    with rc_context(_LOOK | families | settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


@functools.cache
def _fonts() -> dict[str, frozenset[int]]:
    """Return the installed ones of `_FAMILIES`, each with the code points it can draw.

    The faces of a family differ in their characters: `findfont` returns the file of the regular
    face, which matplotlib uses.
    """
    found = {}
    for name in _FAMILIES:
        kind: Any = {"style": "normal", "weight": "normal", "stretch": "normal"}
        regular = font_manager.FontProperties(family=name, **kind)
        try:
            file = font_manager.fontManager.findfont(regular, fallback_to_default=False)
        except ValueError:
            continue
        found[name] = frozenset(font_manager.get_font(file).get_charmap())
    return found


def drawable(words: Sequence[str]) -> bool:
    """Return whether the installed fonts have every character of ``words`` in `alignments`."""
    signs = {ord(sign) for word in words for sign in printable(word)}
    return signs <= frozenset().union(*_fonts().values())


def alignments(
    file: Path,
    panels: Sequence[tuple[str, np.ndarray]],
    source: Sequence[str],
    target: Sequence[str],
    gold: Sequence[tuple[int, int]] = (),
) -> None:
    """Draw attention weights ``[T, S]`` of several models for one sentence, words on both axes.

    Args:
        file: the PNG to write.
        panels: ``(title, weights)``; row t is the step that predicts target word t.
        source: the S source words, across.
        target: the T target words, down.
        gold: pairs ``(source index, target index)`` to frame.
    """
    source, target = [[printable(word) for word in words] for words in (source, target)]
    with look(**{"axes.grid": False}):
        across = min(len(panels), 2 if len(source) > 20 else 3)
        down, side = math.ceil(len(panels) / across), 8.2 / across
        tall = side * min(max(len(target) / max(len(source), 1), 0.6), 1.25)
        figure = Figure(figsize=(8.2, down * (tall + 0.5)), layout="constrained")
        size = 8 if max(len(source), len(target)) <= 12 else 6.5
        for index, (title, weights) in enumerate(panels):
            ax = figure.add_subplot(down, across, index + 1)
            weights = np.asarray(weights, float)  # None is NaN, which is left blank
            image = ax.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
            ax.set_title(title if np.isfinite(weights).all() else f"{title} (diverged)")
            ax.set_xticks(
                range(len(source)), source, rotation=55, ha="right", rotation_mode="anchor",
                fontsize=size,
            )  # fmt: skip
            ax.set_yticks(range(len(target)), target, fontsize=size)
            for s, t in gold:
                corners = np.array([[-1, 1, 1, -1, -1], [-1, -1, 1, 1, -1]]) / 2 + [[s], [t]]
                ax.plot(*corners, color="#d55e00", linewidth=1.1, zorder=3)
            ax.spines[:].set_visible(True)
        bar = figure.colorbar(image, ax=figure.axes, shrink=0.5, aspect=30, pad=0.015)
        bar.outline.set_visible(False)
        bar.set_label("weight", fontsize=8)
        figure.savefig(file)
