"""Dates in English and Chinese, written by Babel from the CLDR: small, by characters, reordered.

English puts the weekday first and the year last, Chinese goes from the year down to the weekday and
puts the time's half of the day before the hour:

    Tuesday, March 5, 2024, 2:07 PM   ->   2024年3月5日星期二 下午2:07

Both sides are formatted by the two locales' own pattern for the same kind of date, so the target
is a function of the source. Each field knows its characters, hence the gold links: digit to digit
surely, everything else of a field to all of that field possibly.

References:
    Unicode CLDR, date field symbols: https://www.unicode.org/reports/tr35/tr35-dates.html
"""

import datetime
import functools
import itertools
import random
from collections.abc import Callable, Iterator

from .dataset import DataError, Dataset, Link, Pair, Split
from .grammar import split_of

BUCKETS = ((4, 10), (11, 16), (17, 24), (25, 32), (33, 48))
TRAIN_SIZE, VALID_SIZE, TEST_SIZE = 10_000, 300, 500
_FIXED_SEED = 20_150_406  # of valid and test
# two-digit years are read as 1950 to 2049, so that every date has one reading
_FIRST = datetime.datetime(1950, 1, 1)
_MINUTES = (datetime.datetime(2050, 1, 1) - _FIRST).days * 24 * 60

# English locale, English kind of date, Chinese kind; a kind is a CLDR length or skeleton
_FORMATS = (
    ("en_US", "full", "full"),
    ("en_US", "long", "long"),
    ("en_US", "medium", "medium"),
    ("en_US", "short", "short"),
    ("en_GB", "full", "full"),
    ("en_GB", "long", "long"),
    ("en_US", "yMMMEd", "yMMMEd"),
    ("en_US", "yMEd", "yMEd"),
    ("en_US", "MMMMEd", "MMMMEd"),
    ("en_US", "MMMd", "MMMd"),
    ("en_US", "yMMMM", "yMMMM"),
    ("en_US", "full hm", "full hm"),
    ("en_US", "long hm", "long hm"),
    ("en_US", "yMMMEd hm", "yMMMEd hm"),
    ("en_GB", "full Hm", "full Hm"),
)
# A stretch of text and the field it belongs to ("" for what stands between fields)
Part = tuple[str, str]
_SAME_FIELD = {
    "L": "M",
    "c": "E",
    "e": "E",
    "H": "h",
    "K": "h",
    "k": "h",
    "B": "a",
    "b": "a",
    "Y": "y",
}


@functools.cache
def _pattern(locale: str, kind: str) -> tuple[tuple[str, str, int], ...]:
    """A locale's pattern as (text, "", 0) and ("", field, width)."""
    from babel import Locale
    from babel.dates import tokenize_pattern

    known = Locale.parse(locale)
    parts: list[tuple[str, str, int]] = []
    for number, name in enumerate(kind.split()):
        formats = known.date_formats if name in known.date_formats else known.datetime_skeletons
        if number:
            parts.append((", " if locale.startswith("en") else " ", "", 0))
        for token, value in tokenize_pattern(getattr(formats[name], "pattern", formats[name])):
            if token == "chars":
                # narrow and no-break blanks look alike and are no help to anyone here
                parts.append((" ".join(f"_{value}_".split())[1:-1], "", 0))
            else:
                field, width = value
                parts.append(("", str(field), int(width)))
    return tuple(parts)


# what a field's text depends on, so that each text is asked of Babel once
_DEPENDS_ON: dict[str, Callable[[datetime.datetime], int]] = {
    "y": lambda moment: moment.year,
    "M": lambda moment: moment.month,
    "d": lambda moment: moment.day,
    "E": lambda moment: moment.weekday(),
    "h": lambda moment: moment.hour,
    "m": lambda moment: moment.minute,
    "a": lambda moment: moment.hour,
}
_texts: dict[tuple[str, str, int, int], str] = {}


def _field(locale: str, field: str, width: int, moment: datetime.datetime) -> str:
    """One field as the locale writes it, as in ("zh", "E", 4) -> 星期二."""
    value = _DEPENDS_ON[_SAME_FIELD.get(field, field)](moment)
    key = locale, field, width, value
    if key not in _texts:
        from babel.dates import DateTimeFormat

        _texts[key] = DateTimeFormat(moment, locale)[field * width]
    return _texts[key]


def render(moment: datetime.datetime, locale: str, kind: str) -> list[Part]:
    """A date as a list of stretches of text, each with its field."""
    parts = []
    for text, field, width in _pattern(locale, kind):
        if field:
            parts.append((_field(locale, field, width, moment), _SAME_FIELD.get(field, field)))
        else:
            parts.append((text, ""))
    return parts


def link(source: list[Part], target: list[Part]) -> Pair:
    """The pair of texts with its links between characters.

    In a field that both sides write in digits the digits are linked from the right, surely; any
    other character of a target field is possibly linked to the whole source field, and so is the
    sign that follows the field (the 年 behind a year).
    """
    places: dict[str, tuple[int, str]] = {}
    start = 0
    for text, field in source:
        if field:
            places[field] = start, text
        start += len(text)
    sure: list[Link] = []
    possible: list[Link] = []
    here = next(field for _, field in target if field)
    end = 0
    for text, field in target:
        here = field or here
        first, other = places[here]
        digits = bool(field) and text.isdecimal() and other.isdecimal()
        for offset in range(len(text)):
            twin = len(other) - len(text) + offset
            if digits and twin >= 0:
                sure.append((first + twin, end + offset))
                possible.append((first + twin, end + offset))
            else:
                possible += [(first + i, end + offset) for i in range(len(other))]
        end += len(text)
    english, chinese = ("".join(text for text, _ in side) for side in (source, target))
    return Pair(english, chinese, tuple(sure), tuple(possible))


def pair(moment: datetime.datetime, kind: int) -> Pair:
    """A moment in the format numbered ``kind``, in English and Chinese.

    Example:
        >>> import datetime
        >>> found = pair(datetime.datetime(2024, 3, 5), 0)
        >>> found.source, found.target
        ('Tuesday, March 5, 2024', '2024年3月5日星期二')
    """
    locale, english, chinese = _FORMATS[kind]
    return link(render(moment, locale, english), render(moment, "zh", chinese))


def dates(seed: int, split: Split) -> Iterator[Pair]:
    """Endless different pairs of one split, all formats equally often."""
    chance = random.Random(seed).random
    seen: set[str] = set()
    while True:
        moment = _FIRST + datetime.timedelta(minutes=int(chance() * _MINUTES))
        locale, english, chinese = _FORMATS[int(chance() * len(_FORMATS))]
        source = render(moment, locale, english)
        text = "".join(stretch for stretch, _ in source)
        if text not in seen and split_of(text) == split:
            seen.add(text)
            yield link(source, render(moment, "zh", chinese))


def _take(source: Iterator[Pair], size: int) -> tuple[Pair, ...]:
    return tuple(itertools.islice(source, size))


def load_dates(*, seed: int, sizes: dict[Split, int | None]) -> Dataset:
    """The dates as a data set; arguments as in :func:`experiments.data.load`."""
    try:
        import babel
    except ImportError as error:
        raise DataError(
            "dates needs the package Babel: pip install 'attention_jax[experiments]'"
        ) from error
    train = _take(dates(seed, "train"), sizes.get("train") or TRAIN_SIZE)
    valid = _take(dates(_FIXED_SEED, "valid"), sizes.get("valid") or VALID_SIZE)
    test = _take(dates(_FIXED_SEED, "test"), sizes.get("test") or TEST_SIZE)
    return Dataset(
        name="dates",
        source_language="English",
        target_language="Chinese",
        train=train,
        valid=valid,
        test=test,
        unit="character",
        provenance=(
            f"Dates from 1950 to 2049 written in {len(_FORMATS)} English formats and their Chinese "
            f"counterparts by Babel {babel.__version__} (seed {seed}), character by character, "
            "gold alignment by field. Split by the hash of the English text: no test text is a "
            "training text of any seed."
        ),
        bleu_tokenize="zh",
        buckets=BUCKETS,
    )
