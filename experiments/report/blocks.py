"""The parts of a report, and numbers as words.

A study makes a `Report` of an answer and sections of text, tables and figures; the template
of `experiments.report.page` turns it into ``report.html``. Every sentence is computed from the
results: the helpers here format the numbers and omit those that were not measured.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Results = Mapping[str, Any]
COMPARE_THE_SHAPE = "other data, other scale: compare the shape"


@dataclasses.dataclass(frozen=True)
class Row:
    """A table row; ``published`` marks figures from a paper, with their source as last words."""

    cells: Sequence[str]
    published: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: the first column names the rows, the others hold text or numbers as text.

    ``prose``: the cells are sentences.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row | Sequence[str]]
    note: str = ""
    prose: bool = False

    def __post_init__(self) -> None:
        rows = [row if isinstance(row, Row) else Row(row) for row in self.rows]
        object.__setattr__(self, "rows", rows)


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG of the run folder with what it shows: ``alt`` is the alternative text."""

    file: str
    alt: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """Attention weights drawn in HTML, for words that no installed font can draw in a PNG.

    ``panels`` are pairs of a title and weights ``[T, S]``; ``gold`` are pairs (source, target).
    """

    caption: str
    panels: Sequence[tuple[str, Any]]
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
    """The content of the template; None among ``answer`` is omitted."""

    title: str
    answer: Sequence[str | None]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()


LABELS = {"none": "no attention", "dot": "unscaled dot", "scaled_dot": "scaled dot"}


def label(name: str) -> str:
    """Return the words for a mechanism: ``scaled_dot`` is ``scaled dot``."""
    return LABELS.get(name, name)


def picture(
    folder: Path, name: str, kind: str, *what: Any, alt: str, caption: str, **options: Any
) -> Picture:
    """Draw ``figures/NAME.png`` in a run's folder by a function of `experiments.report.figures`.

    Args:
        folder: the run's folder.
        name: of the file.
        kind: the function's name, such as "curves".
        *what: its arguments after the file.
        alt: the alternative text of the figure.
        caption: the text below it.
        **options: its keyword arguments.
    """
    from experiments.report import figures  # loads matplotlib, which --help does not need

    (folder / "figures").mkdir(exist_ok=True)
    getattr(figures, kind)(folder / f"figures/{name}.png", *what, **options)
    return Picture(f"figures/{name}.png", alt, caption)


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that were measured and are finite: a model that diverges has others."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the finite values, None without any."""
    return statistics.fmean(measured) if (measured := known(values)) else None


def number(value: float | None, form: str) -> str:
    """Return a value in the format ``form``, an en dash where it is not finite."""
    return format(value, form) if known([value]) else "–"


def mean_sd(values: Sequence[float | None], digits: int = 1, percent: bool = False) -> str:
    """Return ``mean ± standard deviation`` (of the sample), or the one value, or an en dash.

    None and NaN count as not measured: the spread is over the others, whose number is added.
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
    """Return ``seconds`` as text: ``48 s``, ``4 min 10 s``, ``2 h 5 min``."""
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


def joined(words: Iterable[str]) -> str:
    """Return ``a``, ``a and b`` or ``a, b and c``."""
    words = list(words)
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def listed(
    values: Mapping[str, float | None],
    form: str = ".1f",
    *,
    best: Callable[..., Any] | None = None,
    percent: bool = False,
    words: Callable[[str], str] = str,
) -> str:
    """Return names and values as a list in words, without those that were not measured.

    Args:
        values: by name.
        form: of a value.
        best: ``max`` or ``min`` to begin with the highest or the lowest value.
        percent: multiply by 100 and add the sign.
        words: name to the words for it.

    Example:
        >>> listed({"a": 1.0, "b": None, "c": 3.0}, best=max)
        'c 3.0 and a 1.0'
    """
    items = [(name, value) for name, value in values.items() if known([value])]
    if best is not None:
        items.sort(key=lambda item: item[1] or 0.0, reverse=best is max)
    factor, sign = (100, " %") if percent else (1, "")
    return joined(f"{words(name)} {format((v or 0.0) * factor, form)}{sign}" for name, v in items)


def seeds(results: Results) -> str:
    """Return the description of a table's numbers: one seed, or means over several."""
    count = results["settings"]["seeds"]
    return "quick: one seed" if count == 1 else f"mean ± standard deviation, {count} seeds"


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def claims(rows: Iterable[tuple[str, str, str | None]]) -> Table:
    """Return the table of papers, their claims, and our measurements ("" for none)."""
    cells = [
        Row([paper, claim, ours or "–"], published=claim != "–") for paper, claim, ours in rows
    ]
    columns = ["paper", "claim", "ours"]
    return Table(f"Published: {COMPARE_THE_SHAPE}", columns, cells, prose=True)


def diverged(models: Iterable[tuple[str, int | None]]) -> list[str]:
    """Return a warning for each model that diverged.

    Args:
        models: name, seed included, and the step at which the loss was not finite, or None.
    """
    return [
        f"{capital(name)} diverged: the loss was not finite at step {step}; its figures are those "
        "of the last model before it."
        for name, step in models
        if step is not None
    ]


def observations(model: Mapping[str, Any], name: str) -> list[tuple[int, float | None]]:
    """Return the observations of one quantity in training, by step."""
    return [(row["step"], row[name]) for row in model["observed"] if name in row]


def training(
    folder: Path,
    models: Iterable[Results],
    name: str,
    words: str,
    *,
    line: Callable[[Results], str],
    panel: Callable[[Results], str] = lambda model: "",
    log: bool = False,
) -> Picture:
    """Draw one quantity of trained models over the steps: ``loss``, ``gradient_norm`` or observed.

    Args:
        folder: the run's folder.
        models: with their curves, or with ``train``, which has them.
        name: of the quantity, and of the file.
        words: for it.
        line: the line of a model; several are shown by their mean and range.
        panel: the panel of a model.
        log: a logarithmic vertical axis; entropies begin at 0 on another.
    """
    panels: dict[str, dict[str, list[Any]]] = {}
    for model in models:
        train = model.get("train", model)
        curve = train[name] if name in ("loss", "gradient_norm") else observations(train, name)
        panels.setdefault(panel(model), {}).setdefault(line(model), []).append(curve)
    ends = [
        f"{label(n)}{f', {title}' if title else ''} "
        + mean_sd([own[-1][1] for own in curves if own], 3)
        for title, series in panels.items()
        for n, curves in series.items()
    ]
    return picture(
        folder, name, "curves", list(panels.items()), x="step", y=words, log_y=log,
        low_y=0 if name == "entropy" and not log else None,
        alt=f"{words} over the steps. It ends at: {'; '.join(ends)}.",
        caption=f"{words} over the steps, mean and range over the seeds.",
    )  # fmt: skip


def runs(
    models: Iterable[Mapping[str, Any]],
    key: str,
    curve: Callable[[Mapping[str, Any]], Any],
    words: Callable[[str], str] = str,
) -> dict[str, list[Any]]:
    """Return the curve of each model, by the words for its ``key``: the series of a figure."""
    found: dict[str, list[Any]] = {}
    for model in models:
        found.setdefault(words(model[key]), []).append(curve(model))
    return found
