"""Parallel text from the Hugging Face Hub, through the package ``datasets`` (the extra ``hf``).

``hf:NAME[:CONFIG][@REVISION]``, for instance

    hf:bentrevett/multi30k                                  columns en, de
    hf:wmt/wmt14:de-en                                      a column translation: {de, en}
    hf:IWSLT/iwslt2017:iwslt2017-de-en@refs/convert/parquet

The package downloads once and caches; ``@refs/convert/parquet`` is the Hub's own Parquet copy of a
data set that was published as a loading script, which ``datasets`` 4 and later refuse to run.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .dataset import SPLITS, DataError, Dataset, Pair, Split, bleu_tokenizer, language_name
from .splits import at_most, counts, limited, split_pairs

MOST = 200_000  # training pairs where the caller sets no size: what fits in memory with ease
_SPEC = re.compile(r"hf:(?P<name>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<revision>.+))?")
_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("validation", "valid", "dev"),
    "test": ("test",),
}
_INSTEAD = "or give a local file, as in --data FILE.tsv"


def parse(spec: str) -> tuple[str, str | None, str | None]:
    """Name, configuration and revision of ``hf:NAME[:CONFIG][@REVISION]``.

    Example:
        >>> parse("hf:wmt/wmt14:de-en@refs/convert/parquet")
        ('wmt/wmt14', 'de-en', 'refs/convert/parquet')
    """
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise DataError(
            f"{spec}: not of the form hf:NAME[:CONFIG][@REVISION], as in hf:wmt/wmt14:de-en"
        )
    return found["name"], found["config"], found["revision"]


def _download(spec: str) -> Mapping[str, Any]:
    """The data set's splits by name."""
    name, config, revision = parse(spec)
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{spec} needs the package datasets: pip install datasets (the extra hf), {_INSTEAD}"
        ) from error
    # its retries are told by the error in the end; a page of warnings before it helps nobody
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return datasets.load_dataset(name, config, revision=revision)
    except Exception as error:
        # datasets and its HTTP clients share no base class for what can go wrong on the way
        raise DataError(_why(spec, error)) from error


def _why(spec: str, error: Exception) -> str:
    """One line on why a download failed and what would be right."""
    said = " ".join(str(error).split())
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "script" in said:
        advice = "it is a loading script, which datasets no longer runs: try @refs/convert/parquet"
    elif "BuilderConfig" in said or "Config name is missing" in said:
        advice = "name one of its configurations, as in hf:NAME:CONFIG"
    elif kinds & {"DatasetNotFoundError", "DataFilesNotFoundError", "RepositoryNotFoundError"}:
        advice = f"the Hub has no such data set, or it is private: check the name, {_INSTEAD}"
    elif kinds & {"ConnectionError", "OSError", "HTTPError", "TransportError", "TimeoutError"}:
        advice = f"no way to the Hub: check the network, {_INSTEAD}"
    else:
        advice = f"the Hub's data set could not be read, {_INSTEAD}"
    return f"{spec}: {advice} ({type(error).__name__}: {said[:200]})"


def choose_languages(
    spec: str, names: Iterable[str], wanted: tuple[str, str] | None
) -> tuple[str, str]:
    """Source and target among the columns' names.

    Without a wish: English to German if both are there, else English to the one other.
    """
    present = list(names)
    if wanted is not None:
        missing = [name for name in wanted if name not in present]
        if missing:
            raise DataError(f"{spec}: no language {missing[0]!r}; it has {', '.join(present)}")
        return wanted
    if {"en", "de"} <= set(present):
        return "en", "de"
    codes = [name for name in present if re.fullmatch(r"[a-z]{2,3}", name)]
    if len(codes) == 2 and "en" in codes:
        return "en", next(code for code in codes if code != "en")
    raise DataError(
        f"{spec}: which languages? Choose a source and a target of {', '.join(present)}"
    )


def _side(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a row that maps languages to texts."""
    inner = row.get("translation")
    return inner if isinstance(inner, Mapping) else row


def _pairs(rows: Iterable[Mapping[str, Any]], languages: tuple[str, str]) -> list[Pair]:
    """Pairs of the rows that have text on both sides."""
    pairs = []
    for row in rows:
        source, target = (" ".join(str(_side(row)[code] or "").split()) for code in languages)
        if source and target:
            pairs.append(Pair(source, target))
    return pairs


def load_hub(
    spec: str,
    *,
    seed: int,
    sizes: dict[Split, int | None],
    languages: tuple[str, str] | None = None,
) -> Dataset:
    """A data set of the Hub; arguments as in :func:`experiments.data.load`."""
    found = _download(spec)
    by_split: dict[Split, Any] = {
        split: next((found[name] for name in names if name in found), None)
        for split, names in _SPLIT_NAMES.items()
    }
    if by_split["train"] is None:
        raise DataError(f"{spec}: no split 'train'; it has {', '.join(found)}")
    empty = [split for split, rows in by_split.items() if rows is not None and not len(rows)]
    if empty:
        raise DataError(f"{spec}: the split {empty[0]!r} is empty; it needs at least one pair")
    languages = choose_languages(spec, _side(by_split["train"][0]), languages)

    sizes = {**sizes, "train": sizes.get("train") or MOST}
    parts: dict[Split, list[Pair]] = {}
    for split, rows in by_split.items():
        if rows is not None:
            chosen = at_most(range(len(rows)), sizes.get(split), seed if split == "train" else 0)
            parts[split] = _pairs(rows.select(chosen), languages)
    missing: list[Split] = [split for split in SPLITS if split not in parts]
    whole, taken = len(by_split["train"]), min(sizes["train"] or MOST, len(by_split["train"]))
    made = f"{taken:,} of {whole:,} training rows taken. " if taken < whole else ""
    if missing:
        parts |= split_pairs(spec, parts["train"], ("train", *missing))
        made += f"{' and '.join(missing)} split off train by the hash of the source's letters. "
    final = limited(parts, sizes, seed)
    return Dataset(
        name=spec,
        source_language=language_name(languages[0]),
        target_language=language_name(languages[1]),
        train=final["train"],
        valid=final["valid"],
        test=final["test"],
        unit="subword",
        provenance=f"{spec.removeprefix('hf:')} from the Hugging Face Hub. {made}{counts(final)}",
        bleu_tokenize=bleu_tokenizer(languages[1], [pair.target for pair in final["train"]]),
    )
