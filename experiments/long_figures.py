"""The figures of the study of long sequences: many lines, each named at its end, and dots."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.report.figures import look, scales

Line = tuple[Sequence[float], Sequence[float | None]]

# By kind of thing, so that a glance tells patterns from families.
_FULL, _PATTERN, _FAMILY = ("#111827",), ("#0072b2", "#56b4e9", "#3b6ea5"), ("#d55e00", "#e69f00",
    "#cc79a7", "#a3153f")  # fmt: skip
_MARKERS = "osD^vP*Xh<>"


def styles(names: Sequence[str], patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour and marker of each: black for full, blues for patterns, warm for families."""
    found: dict[str, dict[str, Any]] = {}
    counts = {"pattern": 0, "family": 0}
    for name in names:
        if name == "full":
            found[name] = {"color": _FULL[0], "marker": "o", "linewidth": 2.6, "zorder": 5}
            continue
        kind = "pattern" if name in patterns else "family"
        shades = _PATTERN if kind == "pattern" else _FAMILY
        index = counts[kind]
        counts[kind] += 1
        found[name] = {
            "color": shades[index % len(shades)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linewidth": 1.4,
            "linestyle": "-" if kind == "pattern" else "--",
        }
    return found


def costs(
    file: Path,
    lengths: Sequence[int],
    panels: Sequence[tuple[str, str, Mapping[str, Sequence[float | None]]]],
    words: Mapping[str, str],
    patterns: Sequence[str],
) -> None:
    """Draw costs against length, log-log, one line each, with lines of slope 1 and 2 to compare.

    Args:
        file: the PNG to write.
        lengths: along the horizontal axis.
        panels: ``(title, words at the vertical axis, {name: costs})``.
        words: what the legend says of each name.
        patterns: the names that are patterns.
    """
    style = styles(list(words), patterns)
    with look():
        figure = Figure(figsize=(10.4, 5.0), layout="constrained")
        for ax, (title, y, rows) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            ax.set_title(title)
            for name, row in rows.items():
                known = [
                    (n, v)
                    for n, v in zip(lengths, row, strict=True)
                    if v is not None and 0 < v < math.inf
                ]
                ax.plot(
                    [n for n, _ in known], [v for _, v in known], label=words[name],
                    markersize=4.5, **style[name],
                )  # fmt: skip
            scales(ax, "length (T = S)", log_x=True, log_y=True)
            ax.set_xticks(lengths)
            ax.tick_params(axis="x", labelsize=7.5)
            _slopes(ax, lengths)
            ax.set_ylabel(y)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside right center", fontsize=7.5, handlelength=2.6,
            title="exponents: time, temporaries", title_fontsize=8, alignment="left",
        )  # fmt: skip
        figure.savefig(file)


def _slopes(ax: Any, lengths: Sequence[int]) -> None:
    """Thin lines that grow with the length and with its square, from the lower left corner."""
    first, last = lengths[0], lengths[-1]
    if first == last or ax.get_yscale() != "log":
        return
    low, high = ax.get_ylim()
    ax.set_ylim(low, high)
    for power, words in ((1, "∝ T"), (2, "∝ T²")):
        start = low * 1.3
        end = start * (last / first) ** power
        right = last
        if end > high / 1.5:
            right = first * (high / 1.5 / start) ** (1 / power)
            end = high / 1.5
        ax.plot([first, right], [start, end], color="#9aa1a9", linewidth=0.9, linestyle=":")
        middle = (first * right) ** 0.5
        ax.annotate(
            words, (middle, start * (middle / first) ** power), fontsize=7.5, color="#6b7280",
            ha="center", va="center", zorder=1, bbox={"fc": "white", "ec": "none", "pad": 0.8},
        )  # fmt: skip


def dots(
    file: Path,
    names: Sequence[str],
    panels: Sequence[tuple[str, float, Mapping[str, Sequence[float]]]],
    patterns: Sequence[str],
) -> None:
    """Draw one panel a task: a dot for the mean over seeds of each, a line for their range.

    Args:
        file: the PNG to write.
        names: the rows, from the top.
        panels: ``(title, chance, {name: shares of right answers})``.
        patterns: the names that are patterns.
    """
    style = styles(names, patterns)
    with look():
        tall = 0.9 + 0.26 * len(names)
        figure = Figure(figsize=(2.0 + 1.7 * len(panels), tall), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (title, chance, rows) in zip(axes, panels, strict=True):
            ax.set_title(title)
            ax.axvline(100 * chance, color="#9aa1a9", linewidth=0.9, linestyle=":")
            for place, name in enumerate(names):
                values = [100 * v for v in rows.get(name, ()) if v is not None and math.isfinite(v)]
                if not values:
                    continue
                mean, shade = sum(values) / len(values), style[name]["color"]
                ax.plot([0, mean], [place, place], color=shade, alpha=0.25, linewidth=5)
                ax.plot([min(values), max(values)], [place, place], color=shade, linewidth=1.2)
                ax.plot(mean, place, "o", color=shade, markersize=5.5)
            ax.set_xlim(-3, 103)
            ax.set_xlabel("right, %")
            ax.set_yticks(range(len(names)), names)
            ax.grid(visible=False, axis="y")
        axes[0].set_ylim(len(names) - 0.4, -0.6)
        figure.savefig(file)
