"""Parallel text by name: the grammar, the user's files, or a data set of the Hugging Face Hub.

    grammar                          made on the spot, with gold word alignment
    FILE.tsv, FILE.tsv.gz            source<TAB>target a row, or a third column train|valid|test
    SOURCE,TARGET                    two plain files, one sentence a line
    hf:NAME[:CONFIG][@REVISION]      the package ``datasets`` downloads once and caches

Files are UTF-8 without a header. Languages are read from names such as ``help.en-de.tsv.gz`` and
``train.en,train.de``. Pairs that come without splits are split by the hash of the source's letters,
near-duplicates together: 5 % of the pairs, at most 1,000, are valid and as many are test.
"""

import dataclasses
import difflib
import hashlib
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from experiments.data import grammar
from experiments.data.grammar import Pair, Split
from experiments.data.read import (
    SPLITS,
    Languages,
    hub_pairs,
    languages_of,
    read_hub,
    read_plain,
    read_tsv,
)
from experiments.errors import UsageError

Splits = dict[Split, list[Pair]]

_KNOWN = "grammar, FILE.tsv or FILE.tsv.gz, SOURCE.txt,TARGET.txt, hf:NAME[:CONFIG][@REVISION]"
_LANGUAGES = """
ar:Arabic cs:Czech de:German en:English es:Spanish fi:Finnish fr:French hi:Hindi it:Italian
ja:Japanese ko:Korean nl:Dutch pl:Polish pt:Portuguese ro:Romanian ru:Russian tr:Turkish
uk:Ukrainian vi:Vietnamese zh:Chinese
"""
_NAMES = {pair[:2]: pair[3:] for pair in _LANGUAGES.split()}
_SIGN = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # of Chinese, Japanese and Korean
_WORD = re.compile(f"[{_SIGN}]|[^\\s{_SIGN}]+")
_BUCKETS = ((1, 5), (6, 10), (11, 15), (16, 20), (21, 30), (31, 60), (61, 10_000))
_HELD_OUT, _HELD_OUT_MOST = 0.05, 1_000
_HUB_MOST = 200_000  # training pairs of the Hub where no size is given


@dataclasses.dataclass(frozen=True)
class TextSpec:
    """The specification of parallel text: source, sizes and batches.

    Attributes:
        data: ``grammar``, a file, two files or a data set of the Hub; see the module.
        languages: ``SOURCE-TARGET`` codes, as in ``en-de``, where the data does not name them.
        train_size: training pairs to make or to use at most; None is all.
        valid_size: the same for valid.
        test_size: the same for test.
        pieces: size of each sentencepiece vocabulary, for text that is not the grammar's.
        max_length: longest sentence to train on, in tokens; longer test sentences are cut.
        keep_shortest: share of the training sentences to train on, the shortest ones.
        test_longer: test on sentences longer than those trained on, too.
        batch_size: sentences in a batch.
        shapes: the number of batch shapes, 1 to 4.
    """

    data: str = "grammar"
    languages: str | None = None
    train_size: int | None = None
    valid_size: int | None = 256
    test_size: int | None = None
    pieces: int = 4_000
    max_length: int = 80
    keep_shortest: float = 1.0
    test_longer: bool = False
    batch_size: int = 32
    shapes: int = 1

    @property
    def sizes(self) -> dict[Split, int | None]:
        """The sizes by split."""
        return {"train": self.train_size, "valid": self.valid_size, "test": self.test_size}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Parallel text in three splits.

    Attributes:
        name: the data's short name.
        source_language: English name of the source language.
        target_language: English name of the target language.
        train: training pairs.
        valid: pairs to observe during training.
        test: pairs to score, never among ``train``.
        unit: a token is a ``"word"`` of a closed vocabulary, or a ``"subword"`` of sentencepiece.
        provenance: sentences for the report: where the data is from, how it was split.
        bleu_tokenize: sacrebleu's tokeniser for the target side.
        buckets: ranges ``(low, high)`` of source lengths, both included, for scores by length.
        digest: of all the text that there is, whichever part the seed and the sizes choose.
    """

    name: str
    source_language: str
    target_language: str
    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]
    unit: Literal["word", "subword"]
    provenance: str
    bleu_tokenize: str = "13a"
    buckets: tuple[tuple[int, int], ...] = _BUCKETS
    digest: str = ""

    def __post_init__(self) -> None:
        for split in SPLITS:
            if not getattr(self, split):
                raise UsageError(
                    f"{self.name}: the split {split!r} is empty; it needs at least one pair"
                )

    @property
    def aligned(self) -> bool:
        """Whether every test pair has a gold alignment."""
        return all(pair.alignment is not None for pair in self.test)

    def length(self, source: str) -> int:
        """Words of a source; each sign of Chinese, Japanese or Korean counts as one."""
        return len(_WORD.findall(source))

    def lengths(self, split: Split = "test") -> list[int]:
        """Source length of each pair of a split, in order."""
        return [self.length(pair.source) for pair in getattr(self, split)]

    def display(self, text: str) -> str:
        """A text as a person would write it: no blank before a mark, a capital first."""
        if self.unit != "word":
            return text
        text = re.sub(r" ([.,;:!?])", r"\1", text)
        return text[:1].upper() + text[1:]


def load(spec: TextSpec, seed: int = 0) -> Dataset:
    """Return the text that ``spec`` names.

    Args:
        spec: what to load and how much of it.
        seed: decides which training pairs are made or chosen; valid and test do not depend on it.

    Raises:
        UsageError: anything the user can put right, in one line that begins with the option.
    """
    languages = None
    if spec.languages is not None:
        source, _, target = spec.languages.partition("-")
        if not (source and target):
            raise UsageError(f"--languages {spec.languages!r} must be SOURCE-TARGET, as in en-de")
        languages = source, target
    try:
        return _loaded(spec, seed, languages)
    except UsageError as error:
        said = str(error).removeprefix(f"{spec.data}: ")
        raise UsageError(f"--data {spec.data}: {said}") from error


def _loaded(spec: TextSpec, seed: int, languages: Languages | None) -> Dataset:
    data, path = spec.data, Path(spec.data).expanduser()
    if data == "grammar":
        if languages not in (None, ("en", "de")):
            raise UsageError(f"it has no languages to choose, so not {spec.languages}")
        return Dataset(
            "grammar", "English", "German", **grammar.splits(seed, spec.sizes), unit="word",
            provenance=f"Made on the spot by a synchronous English-German grammar (seed {seed}): "
            "verb-final clauses, separable verbs, agreement in gender and case, relative clauses, "
            "gold word alignment. Split by the hash of the English sentence: no test sentence is a "
            "training sentence of any seed.",
            bleu_tokenize="none", buckets=grammar.BUCKETS, digest="made",
        )  # fmt: skip
    if data.startswith("hf:"):
        return _hub(spec, seed, languages)
    if data.endswith((".tsv", ".tsv.gz")) or "," in data:
        return _files(spec, path, seed, languages)
    if not data.strip():
        raise UsageError(f"is empty; known data: {_KNOWN}")
    if os.path.isdir(path):
        raise UsageError(f"is a folder; known data: {_KNOWN}")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"is a device or a pipe, not a file; known data: {_KNOWN}")
    if os.path.exists(path):
        raise UsageError(
            "one plain file is only one side; give both as SOURCE,TARGET (en.txt,de.txt), or a "
            ".tsv with a tab in each row"
        )
    if path.suffix or len(path.parts) > 1:
        raise UsageError(f"no such file; known data: {_KNOWN}")
    hint = " (did you mean grammar?)" if difflib.get_close_matches(data, ["grammar"]) else ""
    raise UsageError(f"unknown data{hint}; known: {_KNOWN}")


def _subwords(
    name: str,
    codes: Languages,
    splits: Splits,
    spec: TextSpec,
    seed: int,
    origin: str,
    digest: str,
) -> Dataset:
    """Return splits, cut to the sizes of ``spec``, as a data set."""
    parts = {
        split: tuple(at_most(pairs, spec.sizes[split], _choice(seed, split)))
        for split, pairs in splits.items()
    }
    trained = {pair.source for pair in parts["train"]}
    seen = sum(pair.source in trained for pair in parts["test"])
    counts = ", ".join(f"{len(parts[split]):,} {split}" for split in SPLITS)
    han = sum("\u4e00" <= sign <= "\u9fff" for pair in parts["train"][:200] for sign in pair.target)
    signs = sum(len(pair.target) for pair in parts["train"][:200])
    tokenize = {"zh": "zh", "ja": "char", "ko": "char"}.get(codes[1])
    source, target = (_NAMES.get(code.lower(), code) for code in codes)
    return Dataset(
        name, source, target, **parts, unit="subword",
        provenance=f"{origin} {counts} pairs; {seen} of the test sources also occur in train.",
        bleu_tokenize=tokenize or ("zh" if han > 0.3 * signs else "13a"), digest=digest,
    )  # fmt: skip


def _choice(seed: int, split: Split) -> int:
    """Return the seed of a choice of pairs: only the one of training pairs depends on the run's."""
    return seed if split == "train" else 0


def at_most(items: Sequence, size: int | None, seed: int) -> list:
    """Return ``size`` of the items, chosen by ``seed``, in their own order; all if fewer."""
    if size is None or size >= len(items):
        return list(items)
    return [items[i] for i in sorted(random.Random(seed).sample(range(len(items)), size))]


def split_key(source: str) -> str:
    """Return what decides the split of a source: its letters.

    Example:
        >>> split_key("Page 3 of 4.") == split_key("page 12, of 7!")
        True
    """
    return re.sub(r"[\W\d_]+", " ", source.lower()).strip()


def split_pairs(pairs: Sequence[Pair], splits: Sequence[Split] = SPLITS) -> Splits:
    """Divide pairs among ``splits`` (train among them) by hash, each in the order of ``pairs``."""
    groups: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(split_key(pair.source), []).append(number)
    if len(groups) < len(splits):
        raise UsageError(
            f"{len(groups)} different sources cannot fill {', '.join(splits)}; it needs at least "
            f"{len(splits)}"
        )
    order = sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest(), reverse=True)
    wanted = max(1, min(_HELD_OUT_MOST, round(_HELD_OUT * len(pairs))))
    where: dict[int, Split] = {}
    for done, split in enumerate((s for s in splits if s != "train"), 1):
        count, others = 0, len(splits) - done  # each of the others still needs a group
        while count == 0 or (count < wanted and len(order) > others):
            members = groups[order.pop()]
            where |= dict.fromkeys(members, split)
            count += len(members)
    result: Splits = {split: [] for split in splits}
    for number, pair in enumerate(pairs):
        result[where.get(number, "train")].append(pair)
    return result


def _files(spec: TextSpec, path: Path, seed: int, languages: Languages | None) -> Dataset:
    plain = "," in spec.data and not os.path.exists(path)
    pairs, named = (read_plain(spec.data), []) if plain else read_tsv(path)
    if named:
        splits: Splits = {split: [] for split in SPLITS}
        for pair, split in zip(pairs, named, strict=True):
            splits[split].append(pair)
        if empty := [split for split in SPLITS if not splits[split]]:
            raise UsageError(
                f"no row belongs to the split {empty[0]!r}; each of train, valid and test needs "
                "one (or leave the third column out)"
            )
        how = "Split as its third column says:"
    else:
        splits, how = split_pairs(pairs), "Split by the hash of the source's letters:"
    codes = languages or languages_of(spec.data) or ("source", "target")
    name, origin = (spec.data, "Lines") if plain else (path.name, "Rows")
    digest = _digest((pairs, named))
    return _subwords(name, codes, splits, spec, seed, f"{origin} of {name}. {how}", digest)


def _hub(spec: TextSpec, seed: int, languages: Languages | None) -> Dataset:
    rows, codes = read_hub(spec.data, languages)
    sizes = {**spec.sizes, "train": spec.train_size or _HUB_MOST}
    splits = {
        split: hub_pairs(
            some.select(at_most(range(len(some)), sizes[split], _choice(seed, split))), codes
        )
        for split, some in rows.items()
    }
    whole, origin = (
        len(rows["train"]),
        f"{spec.data.removeprefix('hf:')} from the Hugging Face Hub.",
    )
    if sizes["train"] < whole:
        origin += f" {sizes['train']:,} of {whole:,} training rows taken."
    if missing := [split for split in SPLITS if split not in splits]:
        splits |= split_pairs(splits["train"], ("train", *missing))
        origin += f" {' and '.join(missing)} split off train by the hash of the source's letters."
    # A fingerprint tells the files and the revision that the rows were read from.
    digest = _digest([(split, getattr(rows[split], "_fingerprint", rows[split])) for split in rows])
    return _subwords(spec.data, codes, splits, spec, seed, origin, digest)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode(errors="backslashreplace")).hexdigest()
