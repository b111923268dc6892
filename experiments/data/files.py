"""Parallel text from the user's files: a TSV, or two plain files that match line by line.

TSV: UTF-8, ``source<TAB>target`` or ``source<TAB>target<TAB>train|valid|test`` a row, no header;
``.gz`` or not. Plain files: line i of the one translates line i of the other. Languages are read
from names such as ``help.en-de.tsv.gz`` or ``train.en,train.de``.
"""

import gzip
import pathlib
import re
import zlib

from .dataset import SPLITS, DataError, Dataset, Pair, Split, bleu_tokenizer, language_name
from .splits import counts, limited, split_pairs

_TWO_LANGUAGES = re.compile(r"(?:^|[._-])([a-z]{2,3})-([a-z]{2,3})(?=[._-]|$)")
_ROW = "a row is source<TAB>target or source<TAB>target<TAB>train|valid|test"


def read_lines(path: pathlib.Path) -> list[str]:
    """Lines of a UTF-8 text file, unzipped where the name ends with ``.gz``, without line ends."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file (looked in {path.parent.absolute()})") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give the file itself") from error
    except PermissionError as error:
        raise DataError(f"{path}: may not be read; check its permissions") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); gzip it, or drop .gz") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; save it as UTF-8") from error
    # not splitlines(): it also breaks at form feeds and Unicode separators inside a sentence
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def read_tsv(path: pathlib.Path) -> tuple[list[Pair], list[Split]]:
    """Pairs of a TSV and their splits; the second list is empty where the file names none."""
    pairs: list[Pair] = []
    splits: list[Split] = []
    columns = 0
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split("\t")]
        here = f"{path}:{number}"
        if len(fields) == 1:
            raise DataError(f"{here}: no tab in this row; {_ROW}")
        if len(fields) > 3:
            raise DataError(f"{here}: {len(fields)} columns; {_ROW}")
        if not fields[0] or not fields[1]:
            raise DataError(f"{here}: the {'target' if fields[0] else 'source'} is empty; {_ROW}")
        columns = columns or len(fields)
        if len(fields) != columns:
            raise DataError(
                f"{here}: {len(fields)} columns where the rows before have {columns}; "
                "name the split in every row or in none"
            )
        if columns == 3:
            if fields[2] not in SPLITS:
                raise DataError(
                    f"{here}: unknown split {fields[2]!r}; it must be {' or '.join(SPLITS)}"
                )
            splits.append(fields[2])
        pairs.append(Pair(fields[0], fields[1]))
    if not pairs:
        raise DataError(f"{path}: no rows; {_ROW}")
    return pairs, splits


def read_plain(spec: str) -> list[Pair]:
    """Pairs of two plain files, ``source.txt,target.txt``; none with an empty side."""
    names = spec.split(",")
    if len(names) != 2 or not all(names):
        raise DataError(
            f"{spec}: a pair of plain files is written SOURCE,TARGET, as in en.txt,de.txt"
        )
    source, target = (read_lines(pathlib.Path(name.strip()).expanduser()) for name in names)
    if len(source) != len(target):
        raise DataError(
            f"{spec}: {len(source)} and {len(target)} lines; line i of the one must translate "
            "line i of the other"
        )
    pairs = [Pair(s.strip(), t.strip()) for s, t in zip(source, target, strict=True)]
    pairs = [pair for pair in pairs if pair.source and pair.target]
    if not pairs:
        raise DataError(f"{spec}: no line has text on both sides")
    return pairs


def languages_of(name: str) -> tuple[str, str] | None:
    """Language codes in a file name or a pair of names, if they are there.

    Example:
        >>> languages_of("help.en-de.tsv.gz"), languages_of("train.en,train.de")
        (('en', 'de'), ('en', 'de'))
    """
    if "," in name:
        source, target = (part.strip().removesuffix(".gz") for part in name.split(",", 1))
        codes = tuple(
            code
            for path in map(pathlib.PurePath, (source, target))
            for code in [path.suffix[1:] if path.suffix not in ("", ".txt") else path.stem]
        )
        return codes if all(re.fullmatch(r"[a-z]{2,3}", code) for code in codes) else None  # type: ignore[return-value]
    found = _TWO_LANGUAGES.search(pathlib.PurePath(name).name)
    return (found[1], found[2]) if found else None


def load_files(
    spec: str,
    *,
    seed: int,
    sizes: dict[Split, int | None],
    languages: tuple[str, str] | None = None,
) -> Dataset:
    """A TSV or a pair of plain files as a data set; arguments as :func:`experiments.data.load`."""
    path = pathlib.Path(spec).expanduser()
    if "," in spec and not path.exists():
        pairs, named = read_plain(spec), []
        origin = f"Lines of {spec}."
    else:
        pairs, named = read_tsv(path)
        origin = f"Rows of {path.name}."
    if named:
        split: dict[Split, list[Pair]] = {name: [] for name in SPLITS}
        for pair, name in zip(pairs, named, strict=True):
            split[name].append(pair)
        for name in SPLITS:
            if not split[name]:
                raise DataError(
                    f"{spec}: no row belongs to the split {name!r}; each of train, valid and test "
                    "needs one (or leave the third column out)"
                )
        how = "Split as its third column says:"
    else:
        split = split_pairs(spec, pairs)
        how = "Split by the hash of the source's letters:"
    parts = limited(split, sizes, seed)
    codes = languages or languages_of(spec) or ("source", "target")
    return Dataset(
        name=path.name if "," not in spec else spec,
        source_language=language_name(codes[0]),
        target_language=language_name(codes[1]),
        **parts,
        unit="subword",
        provenance=f"{origin} {how} {counts(parts)}",
        bleu_tokenize=bleu_tokenizer(codes[1], [pair.target for pair in parts["train"]]),
    )
