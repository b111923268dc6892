"""Figures in one style: the same colour for the same mechanism everywhere, a label on every axis.

Drawn with matplotlib's object interface (no pyplot, no global state). Colours are Okabe and Ito's,
which are colour-blind safe; line styles differ too, for print. Values that are None, NaN or
infinite are not drawn.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from attention_jax.visualize.symbols import printable
from experiments.report.blocks import known, label, mean
from experiments.report.look import INK, PALE, SOFT, alignments, look

__all__ = ["alignments", "bars", "curves", "dots", "ratios"]

# Colour, dashes and, where lines have markers, the marker.
Style = tuple[str, Any, str]
_DOTTED: Any = (0, (1, 1.2))
_STYLES: dict[str, Style] = {
    "our dot": ("#0072b2", "-", "o"), "textbook dot": ("#56b4e9", "--", "o"),
    "our additive": ("#009e73", "-", "o"), "textbook additive": ("#e69f00", "--", "o"),
    "1/√d": ("#0072b2", "-", "o"), "no scale": ("#d55e00", "--", "o"),
    "too strong": ("#cc79a7", ":", "o"), "too weak": ("#e69f00", "-.", "o"),
    "soft cap": ("#e69f00", (0, (4, 3)), "o"), "none": ("#6b7280", _DOTTED, "o"),
    "dot": ("#d55e00", "--", "o"), "scaled_dot": ("#0072b2", "-", "o"),
    "additive": ("#009e73", "-.", "o"), "general": ("#cc79a7", "-", "o"),
    "concat": ("#b8860b", "--", "o"), "cosine": ("#56b4e9", "-.", "o"),
}  # fmt: skip
_SPARE: list[Style] = [
    ("#0072b2", "-", "o"), ("#d55e00", "--", "o"), ("#009e73", "-.", "o"), ("#cc79a7", ":", "o"),
    ("#b8860b", "-", "o"), ("#56b4e9", "--", "o"), ("#6b7280", _DOTTED, "o"),
    ("#7c3aed", "-.", "o"), ("#111827", "-", "o"), ("#e69f00", ":", "o"), ("#a3153f", "--", "o"),
    ("#8b5a2b", "-", "o"),
]  # fmt: skip
Points = Sequence[tuple[float, float | None]]


def curves(
    file: Path,
    panels: Sequence[tuple[str, Mapping[str, Sequence[Points]]]],
    *,
    x: str,
    y: str | Sequence[str],
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = False,
    low_y: float | None = None,
    mark_y: tuple[float, str] | None = None,
    missing: str = "diverged",
    styles: Mapping[str, Style] | None = None,
    labels: Mapping[str, str] | None = None,
    slopes: bool = False,
) -> None:
    """Draw lines, one panel beside the other: mean over the runs of a name, and their range.

    Points at or below 0 are not drawn on a logarithmic axis. A name without any point is in the
    legend with the word ``missing``.

    Args:
        file: the PNG to write.
        panels: ``(title, {name: [run, ...]})``, a run being ``[(x, y), ...]``.
        x: the words under the horizontal axis.
        y: the words at the vertical axis that all panels share, or at that of each.
        log_x: a logarithmic horizontal axis: ticks at powers of two, or where fractions are.
        log_y: a logarithmic vertical axis.
        markers: a marker at each point, for few points.
        low_y: where the vertical axis starts.
        mark_y: a level to mark with a thin line, and its words.
        missing: why a name has no points.
        styles: the style of each name, where it is not the usual one.
        labels: the words for each name, where they are not the usual ones: in a list at the right.
        slopes: lines that grow with x and with its square, to compare with.
    """
    least, drawn, each = 0.0 if log_y else -math.inf, set(), not isinstance(y, str)
    with look():
        wide = (10.4, 5.0) if labels else (7.6, 3.1)
        figure = Figure(figsize=wide, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=not each, squeeze=False)[0]
        for at, (ax, (title, series)) in enumerate(zip(axes, panels, strict=True)):
            ax.set_title(title)
            for index, (name, runs) in enumerate(series.items()):
                style = (styles or {}).get(name) or _style(name, index)
                words = printable((labels or {}).get(name) or label(name))
                if _line(ax, words, style, runs, markers, least):
                    drawn.add(words)
            if not _drawn_at(ax):
                ax.text(0.5, 0.5, missing, transform=ax.transAxes, ha="center", color=SOFT)
            _scales(ax, x, log_x, log_y)
            if slopes:
                _slopes(ax)
            if low_y is not None:
                ax.set_ylim(bottom=low_y)
            if mark_y is not None:
                ax.axhline(mark_y[0], color=PALE, linewidth=0.9, zorder=1)
                ax.annotate(
                    mark_y[1], (1, mark_y[0]), xycoords=("axes fraction", "data"),
                    xytext=(0, 2), textcoords="offset points", ha="right", fontsize=7.5,
                    color=SOFT,
                )  # fmt: skip
            if each or not at:
                ax.set_ylabel(y[at] if each else y)
        place = {"loc": "outside right center", "ncols": 1, "fontsize": 7.5} if labels else {}
        handles, words = axes[0].get_legend_handles_labels()
        words = [name if name in drawn else f"{name} ({missing})" for name in words]
        _legend(figure, handles, words, **place)
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
    values = {name: [known(group) for group in row] for name, row in series.items()}
    means = {name: [mean(group) or 0.0 for group in row] for name, row in values.items()}
    spreads = {
        name: [statistics.stdev(group) if len(group) > 1 else 0.0 for group in row]
        for name, row in values.items()
    }
    tops = [h + e for n in means for h, e in zip(means[n], spreads[n], strict=True)]
    digits = 0 if max((h for row in means.values() for h in row), default=0.0) >= 10 else 1
    with look():
        figure = Figure(figsize=(7.6, 3.1), layout="constrained")
        ax = figure.add_subplot()
        width = 0.8 / max(len(series), 1)
        for index, (name, heights) in enumerate(means.items()):
            errors = spreads[name]
            drawn = ax.bar(
                np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width, heights,
                width * 0.92, color=_style(name, index)[0], label=printable(label(name)),
                yerr=errors if any(errors) else None,
                error_kw={"elinewidth": 1, "ecolor": INK},
            )  # fmt: skip
            pairs = zip(heights, values[name], strict=True)
            words = [f"{h:.{digits}f}" if group else "–" for h, group in pairs]
            ax.bar_label(drawn, words, padding=2, fontsize=7.5, color=INK)
        ax.set_xticks(range(len(groups)), map(printable, groups))
        ax.grid(visible=False, axis="x")
        ax.set_ylim(0, 1.12 * max(tops, default=0.0) or 1)  # room for the numbers on the bars
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        _legend(figure, *ax.get_legend_handles_labels())
        figure.savefig(file)


def ratios(file: Path, rows: Mapping[str, Mapping[str, tuple[Any, Any]]]) -> None:
    """Draw ratios as bars from 1, on a logarithmic axis, each with a tick where its target is.

    Args:
        file: the PNG to write.
        rows: for each name, the ratio and its target (or None) by series.
    """

    def positive(value: float | None) -> bool:
        return value is not None and 0 < value < math.inf

    rows = {
        name: {k: (v, a if positive(a) else None) for k, (v, a) in row.items() if positive(v)}
        for name, row in rows.items()
    }
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    with look():
        figure = Figure(figsize=(8.2, 0.5 + 0.42 * len(rows)), layout="constrained")
        ax = figure.add_subplot()
        tall = 0.8 / max(len(series), 1)
        for index, name in enumerate(series):
            for row, (value, aim) in (
                (i, r[name]) for i, r in enumerate(rows.values()) if name in r
            ):
                y = row + (index - (len(series) - 1) / 2) * tall
                ax.barh(y, value - 1, tall * 0.9, left=1, color=_style("", index)[0])
                ends = value, aim or value
                at, side = (min(ends), "right") if value < 1 else (max(ends), "left")
                ax.text(at, y, f" {value:.2f} ", ha=side, va="center", fontsize=7, color=INK)
                if aim is not None:
                    ax.plot([aim, aim], [y - tall / 2, y + tall / 2], color="#111827", lw=1.6)
            ax.barh(0, 0, color=_style("", index)[0], label=printable(name))
        ends = [1.0, *(e for row in rows.values() for v, a in row.values() for e in (v, a or v))]
        ax.set_xscale("log")
        ax.set_xlim(min(ends) / 1.8, max(ends) * 1.5)
        ax.xaxis.set_major_formatter(FuncFormatter(_plain))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_yticks(range(len(rows)), map(printable, rows))
        ax.invert_yaxis()
        ax.grid(visible=False, axis="y")
        ax.axvline(1, color=INK, linewidth=0.9)
        ax.set_xlabel("ratio of times")
        _legend(figure, *ax.get_legend_handles_labels())
        figure.savefig(file)


def dots(
    file: Path,
    panels: Sequence[tuple[str, float, Mapping[str, Sequence[float | None]]]],
    styles: Mapping[str, Style],
) -> None:
    """Draw a row for each name of ``styles``: a dot for the mean share, a line for the range.

    ``panels`` are ``(title, chance, {name: shares of right answers})``.
    """
    with look():
        tall = 0.9 + 0.26 * len(styles)
        figure = Figure(figsize=(2.0 + 1.7 * len(panels), tall), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (title, chance, rows) in zip(axes, panels, strict=True):
            ax.set_title(title)
            ax.axvline(100 * chance, color=PALE, linewidth=0.9, linestyle=":")
            for row, (name, (shade, *_)) in enumerate(styles.items()):
                if values := [100 * value for value in known(rows.get(name, ()))]:
                    middle = statistics.fmean(values)
                    ax.plot([0, middle], [row, row], color=shade, alpha=0.25, linewidth=5)
                    ax.plot([min(values), max(values)], [row, row], color=shade, linewidth=1.2)
                    ax.plot(middle, row, "o", color=shade, markersize=5.5)
            ax.set_xlim(-3, 103)
            ax.set_xlabel("right, %")
            ax.set_yticks(range(len(styles)), list(styles))
            ax.grid(visible=False, axis="y")
        axes[0].set_ylim(len(styles) - 0.4, -0.6)
        figure.savefig(file)


def _style(name: str, index: int) -> Style:
    return _STYLES.get(name) or _SPARE[index % len(_SPARE)]


def _line(
    ax: Axes, words: str, style: Style, runs: Sequence[Points], markers: bool, least: float
) -> bool:
    """Draw the mean of the runs and their range; return whether there is a point above least."""
    by_x: dict[float, list[float]] = {}
    for at, value in (point for run in runs for point in run):
        if value is not None and least < value < math.inf:
            by_x.setdefault(at, []).append(value)
    at = sorted(by_x)
    shade, dashes, marker = style
    ax.plot(
        at, [statistics.fmean(by_x[p]) for p in at], color=shade, linestyle=dashes, label=words,
        marker=marker if markers else None, zorder=2 if dashes == "-" else 2.5,
    )  # fmt: skip
    if any(len(values) > 1 for values in by_x.values()):
        low, high = [min(by_x[p]) for p in at], [max(by_x[p]) for p in at]
        ax.fill_between(at, low, high, color=shade, alpha=0.15, linewidth=0)
    return bool(at)


def _drawn_at(ax: Axes) -> list[float]:
    return sorted({float(v) for line in ax.lines for v in np.ravel(line.get_xdata())})


def _scales(ax: Axes, x: str, log_x: bool, log_y: bool) -> None:
    """Set the words and the ticks of the axes; without points no axis is logarithmic."""
    ax.set_xlabel(x)
    at = _drawn_at(ax)
    if log_x and at:
        ax.set_xscale("log", base=2)
        if at[0] < 1:
            ax.set_xticks(at)
        ax.xaxis.set_major_formatter(FuncFormatter(_plain))
        ax.xaxis.set_minor_locator(NullLocator())
    if log_y and at:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(_plain))


def _slopes(ax: Axes) -> None:
    """Thin reference lines proportional to x and x², from the lower left corner."""
    at = _drawn_at(ax)
    if len(at) < 2 or ax.get_yscale() != "log":
        return
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    for power, words in ((1, "∝ T"), (2, "∝ T²")):
        start = low * 1.3
        end = min(start * (at[-1] / at[0]) ** power, high / 1.5)
        right = at[0] * (end / start) ** (1 / power)
        ax.plot([at[0], right], [start, end], color=PALE, linewidth=0.9, linestyle=":")
        ax.annotate(
            words, ((at[0] * right) ** 0.5, (start * end) ** 0.5), fontsize=7.5, color=SOFT,
            ha="center", va="center", zorder=1, bbox={"fc": "white", "ec": "none", "pad": 0.8},
        )  # fmt: skip


def _plain(value: float, _: Any = None) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")


def _legend(figure: Figure, handles: Sequence[Any], words: Sequence[str], **options: Any) -> None:
    at_once = 5 if sum(map(len, words)) <= 60 else 3  # five long ones would not fit the width
    place = {"loc": "outside upper left", "ncols": max(min(len(words), at_once), 1)} | options
    if words:
        figure.legend(handles, words, handlelength=2.4, columnspacing=1.6, **place)
