"""Shared parts of figures: colours, axes and text. matplotlib is imported on first use."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_jax.visualize.symbols import printable

if TYPE_CHECKING:
    import matplotlib.figure

INK, SOFT, MARK = "#24292f", "#57606a", "#d55e00"
# DejaVu comes with matplotlib; the others have characters that it lacks, such as Chinese ones.
_FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC",
    "WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Noto Emoji",
    "Arial Unicode MS",
)  # fmt: skip
_PICTURES = re.compile("[\u2400-\u2421]")  # not in DejaVu


def new_figure(width: float | int, height: float | int) -> "matplotlib.figure.Figure":
    """An empty figure, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the figures of attention_jax.visualize need matplotlib: "
            "pip install 'attention_jax[visualize]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_map(axes: Any, weights: np.ndarray, keys: int) -> Any:
    """Draws weights `[T, S]`; a uniform weight over `keys` has a fifth of the full tint."""
    from matplotlib.colors import PowerNorm

    image = axes.imshow(
        weights, cmap="Blues", aspect="auto", interpolation="nearest",
        norm=PowerNorm(min(0.5, math.log(5) / math.log(max(keys, 2))), vmin=0, vmax=1),
    )  # fmt: skip
    frame(axes)
    return image


def frame(axes: Any) -> None:
    """Draws a thin frame without a grid, independently of the user's settings."""
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(color="#b6bdc6", linewidth=0.6, visible=True)


def weight_bar(figure: Any, image: Any) -> None:
    """Adds a colour bar of weights."""
    marks = [w for w in (0, 0.002, 0.01, 0.05, 0.2, 0.5, 1) if w == 0 or image.norm(w) >= 0.09]
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.7, aspect=28, pad=0.015, ticks=marks)
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels([f"{w:g}" for w in marks], fontsize=7)
    bar.ax.tick_params(length=0, colors=SOFT)
    set_text(bar.set_label, "weight", size=8, color=SOFT)


def ticks(
    axes: Any,
    across: Sequence[str] | None,
    down: Sequence[str] | None,
    *,
    size: float | int,
    upright: bool = False,
) -> None:
    """Labels the cells of an image, or removes the ticks."""
    rotated = {"rotation": 55, "ha": "right", "rotation_mode": "anchor"}
    slant = {} if upright or max(map(len, across or ()), default=0) <= 2 else rotated
    for setter, words, options in ((axes.set_xticks, across, slant), (axes.set_yticks, down, {})):
        if words is None:
            setter([])
        else:
            setter(
                range(len(words)),
                [printable_label(word) for word in words],
                **_font(size),
                **options,
            )
    axes.tick_params(length=0, colors=INK)


def set_text(
    setter: Callable[..., Any], words: str, *, size: float | int, fold: int = 80, **options: Any
) -> None:
    """Sets a text verbatim, without math mode; long paths are wrapped after a slash."""
    lines = [""]
    for piece in re.split("(?<=/)", printable_label(words)):
        if len(lines[-1]) + len(piece) > fold and lines[-1]:
            lines.append("")
        lines[-1] += piece
    setter("\n".join(lines), **_font(size), **options)


def printable_label(word: str) -> str:
    """A token as a printable label, with symbols for white space and control characters."""
    shown = printable(word if word.strip() else word.replace(" ", "␣")) or "∅"
    return _PICTURES.sub(lambda found: found[0] if _has_glyph(found[0]) else "\ufffd", shown)


def _font(size: float | int) -> dict[str, Any]:
    return {"fontsize": size, "fontfamily": list(_installed()), "parse_math": False}


@functools.cache
def _installed() -> tuple[str, ...]:
    """The installed families of `_FAMILIES`."""
    from matplotlib import font_manager

    names = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(name for name in _FAMILIES if name in names) or ("sans-serif",)


@functools.cache
def _has_glyph(character: str) -> bool:
    """Whether an installed family has a glyph for the character."""
    from matplotlib import font_manager

    files = (font_manager.findfont(family) for family in _installed())
    return any(ord(character) in font_manager.get_font(file).get_charmap() for file in files)
