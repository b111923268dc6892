"""Pairs of sentences from files and from the Hugging Face Hub."""

import gzip
import logging
import re
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from experiments.data.grammar import Pair, Split
from experiments.errors import UsageError

SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Languages = tuple[str, str]

_ROW = "a row is source<TAB>target or source<TAB>target<TAB>train|valid|test"
_HUB = re.compile(r"hf:([^:@]+)(?::([^@]+))?(?:@(.+))?")
_HUB_SPLITS = {"train": ("train",), "valid": ("validation", "valid", "dev"), "test": ("test",)}
_INSTEAD = "or give a local file, as in --data FILE.tsv"


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file, unzipped where the name ends with ``.gz``."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
            kind = "a folder; give the file itself" if stat.S_ISDIR(mode) else "not a regular file"
            raise UsageError(f"{path}: is {kind}")
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UsageError:
        raise
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file (looked in {path.parent.absolute()})") from error
    except PermissionError as error:
        raise UsageError(f"{path}: may not be read; check its permissions") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(
            f"{path}: not a whole gzip file ({error}); gzip it, or drop .gz"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    except MemoryError as error:
        raise UsageError(f"{path}: does not fit into memory") from error
    except (OSError, ValueError) as error:  # a loop of links, too long a name, a NUL in it
        raise UsageError(f"{path}: cannot be read: {error}") from error
    # splitlines() would also break at form feeds and Unicode separators inside a sentence.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def read_tsv(path: Path) -> tuple[list[Pair], list[Split]]:
    """Return the pairs of a TSV and their splits; no splits if the file names none."""
    rows: list[list[str]] = []
    for number, line in enumerate(read_lines(path), 1):
        fields = [field.strip() for field in line.split("\t")]
        if not line.strip():
            continue
        wrong = None
        if len(fields) == 1:
            wrong = f"no tab in this row; {_ROW}"
        elif len(fields) > 3:
            wrong = f"{len(fields)} columns; {_ROW}"
        elif not fields[0] or not fields[1]:
            wrong = f"the {'target' if fields[0] else 'source'} is empty; {_ROW}"
        elif rows and len(fields) != len(rows[0]):
            wrong = f"{len(fields)} columns where the rows before have {len(rows[0])}; "
            wrong += "name the split in every row or in none"
        elif len(fields) == 3 and fields[2] not in SPLITS:
            wrong = f"unknown split {fields[2]!r}; it must be {' or '.join(SPLITS)}"
        if wrong:
            raise UsageError(f"line {number}: {wrong}")
        rows.append(fields)
    if not rows:
        raise UsageError(f"no rows; {_ROW}")
    return [Pair(row[0], row[1]) for row in rows], [split for row in rows for split in row[2:]]  # type: ignore[misc]


def read_plain(spec: str) -> list[Pair]:
    """Return the pairs of two plain files, those without an empty side."""
    names = spec.split(",")
    if len(names) != 2 or not all(names):
        raise UsageError("a pair of plain files is written SOURCE,TARGET, as in en.txt,de.txt")
    source, target = (read_lines(Path(name.strip()).expanduser()) for name in names)
    if len(source) != len(target):
        raise UsageError(
            f"{len(source)} and {len(target)} lines; line i of the one must translate line i of "
            "the other"
        )
    pairs = [Pair(s.strip(), t.strip()) for s, t in zip(source, target, strict=True)]
    pairs = [pair for pair in pairs if pair.source and pair.target]
    if not pairs:
        raise UsageError("no line has text on both sides")
    return pairs


def languages_of(name: str) -> Languages | None:
    """Return the language codes in a file name or a pair of names, None where there are none.

    Example:
        >>> languages_of("help.en-de.tsv.gz"), languages_of("train.en,train.de")
        (('en', 'de'), ('en', 'de'))
    """
    if "," in name:
        paths = [PurePath(part.strip().removesuffix(".gz")) for part in name.split(",", 1)]
        found = [p.stem if p.suffix in ("", ".txt") else p.suffix[1:] for p in paths]
        named = all(re.fullmatch(r"[a-z]{2,3}", code) for code in found)
        return (found[0], found[1]) if named else None
    match = re.search(r"(?:^|[._-])([a-z]{2,3})-([a-z]{2,3})(?=[._-]|$)", PurePath(name).name)
    return (match[1], match[2]) if match else None


def read_hub(spec: str, wanted: Languages | None) -> tuple[dict[Split, Any], Languages]:
    """Return the splits of ``hf:NAME[:CONFIG][@REVISION]``, as rows, and the languages to use.

    ``@refs/convert/parquet`` is the Hub's Parquet copy of a data set that is a loading script.
    """
    found = _HUB.fullmatch(spec)
    if found is None:
        raise UsageError("not of the form hf:NAME[:CONFIG][@REVISION], as in hf:wmt/wmt14:de-en")
    name, config, revision = found.groups()
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"needs the package datasets: pip install datasets (the extra hf), {_INSTEAD}"
        ) from error
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns at every retry
    try:
        loaded = datasets.load_dataset(name, config, revision=revision)
    except Exception as error:
        # datasets and its HTTP clients share no base class of errors
        raise UsageError(_why(error)) from error
    splits: dict[Split, Any] = {
        split: loaded[name]
        for split, names in _HUB_SPLITS.items()
        for name in names
        if name in loaded
    }
    if "train" not in splits:
        raise UsageError(f"no split 'train'; it has {', '.join(loaded)}")
    for split, rows in splits.items():
        if not len(rows):
            raise UsageError(f"the split {split!r} is empty; it needs at least one pair")
    return splits, _languages(list(_side(splits["train"][0])), wanted)


def hub_pairs(rows: Iterable[Mapping[str, Any]], languages: Languages) -> list[Pair]:
    """Return the pairs of the rows that have text on both sides."""
    sides = ([" ".join(str(_side(r)[code] or "").split()) for code in languages] for r in rows)
    return [Pair(source, target) for source, target in sides if source and target]


def _side(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a row that maps languages to texts."""
    inner = row.get("translation")
    return inner if isinstance(inner, Mapping) else row


def _languages(present: list[str], wanted: Languages | None) -> Languages:
    """Return source and target; by default English to German, or to the one other language."""
    if wanted is not None:
        for code in wanted:
            if code not in present:
                raise UsageError(f"no language {code!r}; it has {', '.join(present)}")
        return wanted
    codes = [name for name in present if re.fullmatch(r"[a-z]{2,3}", name)]
    others = ["de"] if "de" in codes else [code for code in codes if code != "en"]
    if "en" in codes and len(others) == 1:
        return "en", others[0]
    raise UsageError(
        f"which languages? Choose a source and a target of {', '.join(present)} with --languages"
    )


def _why(error: Exception) -> str:
    """Return the cause of a failed download and the remedy, in one line."""
    said = " ".join(str(error).split())
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    if "script" in said:
        advice = "it is a loading script, which datasets no longer runs: try @refs/convert/parquet"
    elif "BuilderConfig" in said or "Config name is missing" in said:
        advice = "name one of its configurations, as in hf:NAME:CONFIG"
    elif re.search("NotFoundError", kinds):
        advice = f"the Hub has no such data set, or it is private: check the name, {_INSTEAD}"
    elif re.search("ConnectionError|OSError|HTTPError|TransportError|TimeoutError", kinds):
        advice = f"no connection to the Hub: check the network, {_INSTEAD}"
    else:
        advice = f"the Hub's data set could not be read, {_INSTEAD}"
    return f"{advice} ({type(error).__name__}: {said[:200]})"
