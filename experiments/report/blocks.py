"""The parts of a report, and the numbers in it as words.

A study makes a `Report` of question, answer and sections of text, tables and figures; the template
of `experiments.report.page` turns it into ``report.html``. Published figures are table rows marked
``published``.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

COMPARE_THE_SHAPE = "other data, other scale: compare the shape"


@dataclasses.dataclass(frozen=True)
class Row:
    """A table row; ``published`` marks figures from a paper, with their source as last words."""

    cells: Sequence[str]
    published: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: the first column names the rows, the others hold text or numbers as text."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    prose: bool = False  # the cells are sentences


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG of the run folder with what it shows: ``alt`` for those who cannot see it."""

    file: str
    alt: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """Attention weights drawn in HTML, for words that no font at hand can put into a PNG.

    ``panels`` are pairs of a title and weights ``[T, S]``; ``gold`` are pairs (source, target).
    """

    caption: str
    panels: Sequence[tuple[str, np.ndarray]]
    source: Sequence[str]
    target: Sequence[str]
    gold: Sequence[tuple[int, int]] = ()


Block = Table | Picture | Heatmap


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report: paragraphs, then tables and pictures in order."""

    title: str
    text: Sequence[str] = ()
    blocks: Sequence[Block] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """All that the template shows."""

    title: str
    question: str
    answer: Sequence[str]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that were measured and are finite: a model that diverges has others."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the finite values, None without any."""
    return statistics.fmean(measured) if (measured := known(values)) else None


def number(value: float | None, form: str) -> str:
    """Return a value in the format ``form``, an en dash where it is not finite."""
    return format(value, form) if known([value]) else "–"


def diverged(models: Iterable[tuple[str, int | None]]) -> list[str]:
    """Return a warning for each model that diverged.

    Args:
        models: name, seed included, and the step at which the loss was not finite, or None.
    """
    return [
        f"{name[:1].upper()}{name[1:]} diverged: the loss was not finite at step {step}; its "
        "figures are those of the last model before it."
        for name, step in models
        if step is not None
    ]


def mean_sd(values: Sequence[float | None], digits: int = 1, percent: bool = False) -> str:
    """Return ``mean ± standard deviation`` (of the sample), or the one value, or an en dash.

    None and NaN count as not measured: the spread is over the others, and it is said how many.
    """
    factor, sign = (100, " %") if percent else (1, "")
    finite = [v * factor for v in known(values)]
    if not finite:
        return "–"
    text = f"{statistics.fmean(finite):.{digits}f}"
    if len(finite) > 1:
        text += f" ± {statistics.stdev(finite):.{digits}f}"
    text += sign
    return text if len(finite) == len(values) else f"{text} ({len(finite)} of {len(values)})"


def duration(seconds: float | None) -> str:
    """Return ``seconds`` in words a person would use: ``48 s``, ``4 min 10 s``, ``2 h 5 min``."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def memory(size: float | None) -> str:
    """Return a number of bytes in words: ``532 KiB``, ``1.3 GiB``."""
    if size is None or not math.isfinite(size):
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def joined(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    words = list(words)
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
