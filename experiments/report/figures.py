"""Figures with one look: the same colour for the same mechanism everywhere, words on every axis.

Drawn with matplotlib's object interface (no pyplot, no global state). Colours are Okabe and Ito's,
told apart with any colour vision; line styles differ too, for print.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from attention_jax.visualize.symbols import printable

LABELS = {
    "none": "no attention",
    "dot": "unscaled dot",
    "scaled_dot": "scaled dot",
    "additive": "additive",
    "general": "general",
    "concat": "concat",
    "cosine": "cosine",
}
_STYLES: dict[str, tuple[str, Any]] = {
    "our dot": ("#0072b2", "-"),
    "textbook dot": ("#56b4e9", "--"),
    "our additive": ("#009e73", "-"),
    "textbook additive": ("#e69f00", "--"),
    "1/√d": ("#0072b2", "-"),
    "no scale": ("#d55e00", "--"),
    "too strong": ("#cc79a7", ":"),
    "too weak": ("#e69f00", "-."),
    "soft cap": ("#e69f00", (0, (4, 3))),
    "none": ("#6b7280", (0, (1, 1.2))),
    "dot": ("#d55e00", "--"),
    "scaled_dot": ("#0072b2", "-"),
    "additive": ("#009e73", "-."),
    "general": ("#cc79a7", "-"),
    "concat": ("#b8860b", "--"),
    "cosine": ("#56b4e9", "-."),
}
_SPARE: list[tuple[str, Any]] = [
    ("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", ":"), ("#b8860b", "-"),
    ("#56b4e9", "--"), ("#6b7280", (0, (1, 1.2))), ("#7c3aed", "-."), ("#111827", "-"),
    ("#e69f00", ":"), ("#a3153f", "--"), ("#8b5a2b", "-"),
]  # fmt: skip
_LOOK = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": "#3b4149",
    "axes.edgecolor": "#9aa1a9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e7e9ec",
    "grid.linewidth": 0.8,
    **{f"{axis}tick.color": "#3b4149" for axis in "xy"},
    **{f"{axis}tick.major.size": 0 for axis in "xy"},
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "savefig.dpi": 150,
    # A dollar sign in a name or in a word of the data begins no formula.
    "text.parse_math": False,
    "text.usetex": False,
}

Points = Sequence[tuple[float, float | None]]


@contextlib.contextmanager
def look(**settings: Any) -> Iterator[None]:
    """The context in which every figure is drawn; ``settings`` add to matplotlib's.

    Signs without a glyph give no warning: `drawable` tells, and the report draws them in HTML.
    """
    families = {"font.sans-serif": list(_fonts())}
    with rc_context(_LOOK | families | settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def label(name: str) -> str:
    """Return the words for a mechanism: ``scaled_dot`` is ``scaled dot``."""
    return LABELS.get(name) or printable(name)


def colour(name: str, index: int = 0) -> str:
    """Return the colour of a mechanism, or the ``index``-th spare one for other names."""
    return _style(name, index)[0]


# DejaVu comes with matplotlib; the others are tried for signs it lacks (Chinese, say).
_FAMILIES = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "PingFang SC", "Hiragino Sans GB",
    "Microsoft YaHei", "SimHei", "Arial Unicode MS",
)  # fmt: skip


@functools.cache
def _fonts() -> dict[str, frozenset[int]]:
    """Return the installed ones of `_FAMILIES`, each with the code points it can draw.

    A family has many faces, and not all have the same characters: `findfont` returns the file of
    the regular one, which is the one that matplotlib draws with.
    """
    found = {}
    for name in _FAMILIES:
        kind = {"style": "normal", "weight": "normal", "stretch": "normal"}
        regular = font_manager.FontProperties(family=name, **kind)
        try:
            file = font_manager.fontManager.findfont(regular, fallback_to_default=False)
        except ValueError:
            continue
        found[name] = frozenset(font_manager.get_font(file).get_charmap())
    return found


def drawable(words: Sequence[str]) -> bool:
    """Return whether the fonts at hand have every sign of ``words``, as `alignments` shows them."""
    signs = {ord(sign) for word in words for sign in printable(word)}
    return signs <= frozenset().union(*_fonts().values())


def curves(
    file: Path,
    panels: Sequence[tuple[str, Mapping[str, Sequence[Points]]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
    same_y: bool = True,
    low_y: float | None = None,
    mark_y: tuple[float, str] | None = None,
    missing: str = "diverged",
) -> None:
    """Draw lines, one panel beside the other: mean over the runs of a name, and their range.

    Points that are None, NaN or infinite are left out, and those at or below 0 on a logarithmic
    axis. A name without any point is in the legend with the word ``missing``.

    Args:
        file: the PNG to write.
        panels: ``(title, {name: [run, ...]})``, a run being ``[(x, y), ...]``.
        x: the words under the horizontal axis.
        y: the words at the vertical axis.
        log_x: a logarithmic horizontal axis: ticks at powers of two, or where fractions are.
        log_y: a logarithmic vertical axis.
        markers: a dot at each point, for few points.
        same_y: all panels share their vertical axis.
        low_y: where the vertical axis starts.
        mark_y: a level to mark with a thin line, and its words.
        missing: why a name has no points.
    """
    least, drawn = 0.0 if log_y else -math.inf, set()
    with look():
        figure, axes = _panels(len(panels), height=3.1, same_y=same_y)
        for ax, (title, series) in zip(axes, panels, strict=True):
            ax.set_title(title)
            for index, (name, runs) in enumerate(series.items()):
                if _line(ax, name, index, runs, markers, least):
                    drawn.add(name)
            if not any(line.get_xdata().size for line in ax.lines):
                ax.text(0.5, 0.5, missing, transform=ax.transAxes, ha="center", color="#6b7280")
            scales(ax, x, log_x, log_y)
            if low_y is not None:
                ax.set_ylim(bottom=low_y)
            if mark_y is not None:
                ax.axhline(mark_y[0], color="#9aa1a9", linewidth=0.9, zorder=1)
                ax.annotate(
                    mark_y[1], (1, mark_y[0]), xycoords=("axes fraction", "data"),
                    xytext=(0, 2), textcoords="offset points", ha="right", fontsize=7.5,
                    color="#6b7280",
                )  # fmt: skip
        axes[0].set_ylabel(y)
        absent = {n for _, series in panels for n in series} - drawn
        _legend(figure, axes[0], {label(n): f"{label(n)} ({missing})" for n in absent})
        figure.savefig(file)


def bars(
    file: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Sequence[float | None]]],
    *,
    x: str,
    y: str,
) -> None:
    """Draw grouped bars with the spread over seeds: ``series[name][group]`` is a list of values."""
    known = {
        name: [[v for v in group if v is not None and math.isfinite(v)] for group in values]
        for name, values in series.items()
    }
    means = {n: [float(np.mean(g)) if g else 0.0 for g in row] for n, row in known.items()}
    spreads = {
        n: [float(np.std(g, ddof=1)) if len(g) > 1 else 0.0 for g in row]
        for n, row in known.items()
    }
    tops = [h + e for n in means for h, e in zip(means[n], spreads[n], strict=True)]
    highest = max(tops, default=0.0)
    digits = 0 if max((h for row in means.values() for h in row), default=0.0) >= 10 else 1
    with look():
        figure, (ax,) = _panels(1, height=3.1)
        width = 0.8 / max(len(series), 1)
        for index, (name, heights) in enumerate(means.items()):
            errors = spreads[name]
            places = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
            drawn = ax.bar(
                places, heights, width * 0.92, color=colour(name, index), label=label(name),
                yerr=errors if any(errors) else None,
                error_kw={"elinewidth": 1, "ecolor": "#3b4149"},
            )  # fmt: skip
            pairs = zip(heights, known[name], strict=True)
            words = [f"{h:.{digits}f}" if k else "–" for h, k in pairs]
            ax.bar_label(drawn, words, padding=2, fontsize=7.5, color="#3b4149")
        ax.set_xticks(range(len(groups)), map(printable, groups))
        ax.grid(visible=False, axis="x")
        ax.set_ylim(0, 1.12 * highest or 1)  # room for the numbers on the bars
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        _legend(figure, ax)
        figure.savefig(file)


def ratios(file: Path, rows: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> None:
    """Draw ratios as bars from 1, on a logarithmic axis, each with a tick where its target is.

    Args:
        file: the PNG to write.
        rows: for each name, the ratio and its target (or None) by series.
    """
    rows = {
        name: {k: (v, a if _positive(a) else None) for k, (v, a) in row.items() if _positive(v)}
        for name, row in rows.items()
    }
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    with look():
        figure = Figure(figsize=(8.2, 0.5 + 0.42 * len(rows)), layout="constrained")
        ax = figure.add_subplot()
        tall = 0.8 / max(len(series), 1)
        for index, name in enumerate(series):
            for place, row in enumerate(rows.values()):
                if name in row:
                    value, aim = row[name]
                    y = place + (index - (len(series) - 1) / 2) * tall
                    ax.barh(y, value - 1, tall * 0.9, left=1, color=colour("", index))
                    words, ends = f" {value:.2f} ", (value, aim or value)
                    at, side = (min(ends), "right") if value < 1 else (max(ends), "left")
                    ax.text(at, y, words, ha=side, va="center", fontsize=7, color="#3b4149")
                    if aim is not None:
                        ax.plot([aim, aim], [y - tall / 2, y + tall / 2], color="#111827", lw=1.6)
            ax.barh(0, 0, color=colour("", index), label=printable(name))
        ax.set_xscale("log")
        ends = [
            1.0,
            *(end for row in rows.values() for v, a in row.values() for end in (v, a or v)),
        ]
        ax.set_xlim(min(ends) / 1.8, max(ends) * 1.5)
        ax.xaxis.set_major_formatter(FuncFormatter(_plain))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_yticks(range(len(rows)), map(printable, rows))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.axvline(1, color="#3b4149", linewidth=0.9)
        ax.set_xlabel("ratio of times")
        if series:
            figure.legend(loc="outside upper left", ncols=len(series))
        figure.savefig(file)


def _positive(value: float | None) -> bool:
    """Return whether a logarithmic axis has a place for ``value``."""
    return value is not None and 0 < value < math.inf


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
        panels: ``(title, weights)``; row t is the target word written when looking. Weights that
            are not finite, or None, are those of a model that diverged: they are not drawn.
        source: the S source words, across.
        target: the T target words, down.
        gold: pairs ``(source index, target index)`` to frame.
    """
    source, target = [[printable(word) for word in words] for words in (source, target)]
    with look(**{"axes.grid": False}):
        across = min(len(panels), 2 if len(source) > 20 else 3)
        down = math.ceil(len(panels) / across)
        side = 8.2 / across
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
                ax.plot(
                    [s - 0.5, s + 0.5, s + 0.5, s - 0.5, s - 0.5],
                    [t - 0.5, t - 0.5, t + 0.5, t + 0.5, t - 0.5],
                    color="#d55e00", linewidth=1.1, zorder=3,
                )  # fmt: skip
            ax.spines[:].set_visible(True)
        bar = figure.colorbar(image, ax=figure.axes, shrink=0.5, aspect=30, pad=0.015)
        bar.outline.set_visible(False)
        bar.set_label("weight", fontsize=8)
        figure.savefig(file)


def _panels(count: int, height: float, same_y: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes = figure.subplots(1, count, sharey=same_y, squeeze=False)
    return figure, list(axes[0])


def _line(
    ax: Axes, name: str, index: int, runs: Sequence[Points], markers: bool, least: float
) -> bool:
    """Draw the mean of the runs and their range; return whether there is a point above least."""
    by_x: dict[float, list[float]] = {}
    for run in runs:
        for place, value in run:
            if value is not None and least < value < math.inf:
                by_x.setdefault(place, []).append(value)
    places = sorted(by_x)
    means = [float(np.mean(by_x[p])) for p in places]
    shade, dashes = _style(name, index)
    ax.plot(
        places, means, color=shade, linestyle=dashes, label=label(name),
        marker="o" if markers else None, markersize=4, zorder=2 if dashes == "-" else 2.5,
    )  # fmt: skip
    if any(len(values) > 1 for values in by_x.values()):
        low, high = [min(by_x[p]) for p in places], [max(by_x[p]) for p in places]
        ax.fill_between(places, low, high, color=shade, alpha=0.15, linewidth=0)
    return bool(places)


def scales(ax: Axes, x: str, log_x: bool, log_y: bool) -> None:
    """Set the words and the ticks of the axes; without points no axis is logarithmic."""
    ax.set_xlabel(x)
    places = sorted({float(v) for line in ax.lines for v in line.get_xdata()})
    if log_x and places:
        ax.set_xscale("log", base=2)
        if places[0] < 1:
            ax.set_xticks(places)
        ax.xaxis.set_major_formatter(FuncFormatter(_plain))
        ax.xaxis.set_minor_locator(NullLocator())
    if log_y and places:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(_plain))


def _plain(value: float, _: Callable | None = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")


def _legend(figure: Figure, ax: Axes, renamed: Mapping[str, str] | None = None) -> None:
    handles, labels = ax.get_legend_handles_labels()
    labels = [(renamed or {}).get(name, name) for name in labels]
    at_once = 5 if sum(map(len, labels)) <= 60 else 3  # five long ones would not fit the width
    figure.legend(
        handles, labels, loc="outside upper left", ncols=max(min(len(labels), at_once), 1),
        handlelength=2.4, columnspacing=1.6,
    )  # fmt: skip


def _style(name: str, index: int) -> tuple[str, Any]:
    return _STYLES.get(name) or _SPARE[index % len(_SPARE)]
