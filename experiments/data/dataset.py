"""What the experiments call data: pairs of texts, three splits, and how to score them."""

import dataclasses
import re
from typing import Literal

from experiments.errors import UsageError

Link = tuple[int, int]
Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

_HAN = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
_BEFORE_MARK = re.compile(r" ([.,;:!?])")

LANGUAGES = {
    "ar": "Arabic",
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fi": "Finnish",
    "fr": "French",
    "hi": "Hindi",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
TEXT_BUCKETS = ((1, 5), (6, 10), (11, 15), (16, 20), (21, 30), (31, 60), (61, 10_000))


class DataError(UsageError):
    """The user's data cannot be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """One sentence in two languages.

    Attributes:
        source: The source text; where the data set's unit is a word, its tokens joined by a blank.
        target: The target text, likewise.
        alignment: Sure links ``(source index, target index)`` between tokens, counted from 0, or
            None where nobody knows them.
        possible: Links that are not wrong either; contains every sure link. None as above.
    """

    source: str
    target: str
    alignment: tuple[Link, ...] | None = None
    possible: tuple[Link, ...] | None = None

    def gold(self) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        """Sure and possible links; ValueError where they are not known."""
        if self.alignment is None:
            raise ValueError(f"nobody has aligned {self.source!r} and {self.target!r}")
        return self.alignment, self.possible if self.possible is not None else self.alignment


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Parallel text in three splits.

    Attributes:
        name: What the user asked for, in short.
        source_language: English name of the source language.
        target_language: English name of the target language.
        train: Pairs to learn from.
        valid: Pairs to watch during training.
        test: Pairs to score, never among ``train``.
        unit: What a token is: a ``"word"`` of a closed vocabulary, a ``"character"``, or a
            ``"subword"`` that a sentencepiece model has to find first.
        provenance: Sentences for the report: where the data is from, how it was split, what was
            left out.
        bleu_tokenize: sacrebleu's tokeniser for the target side.
        buckets: Ranges ``(low, high)`` of source lengths, both ends included, for scores by length.
    """

    name: str
    source_language: str
    target_language: str
    train: tuple[Pair, ...]
    valid: tuple[Pair, ...]
    test: tuple[Pair, ...]
    unit: Literal["word", "character", "subword"]
    provenance: str
    bleu_tokenize: str = "13a"
    buckets: tuple[tuple[int, int], ...] = TEXT_BUCKETS

    def __post_init__(self) -> None:
        for split in SPLITS:
            if not getattr(self, split):
                raise DataError(
                    f"{self.name}: the split {split!r} is empty; it needs at least one pair"
                )

    @property
    def aligned(self) -> bool:
        """Whether every test pair has a gold alignment."""
        return all(pair.alignment is not None for pair in self.test)

    @property
    def longest_trained(self) -> int:
        """Length of the longest training source; longer test sentences are extrapolation."""
        return max(self.length(pair.source) for pair in self.train)

    def length(self, source: str) -> int:
        """Length of a source in the unit that ``buckets`` count.

        Characters where the unit is a character; else words, where each sign of Chinese, Japanese
        or Korean counts as one.
        """
        if self.unit == "character":
            return len(source)
        return len(_HAN.findall(source))

    def lengths(self, split: Split = "test") -> list[int]:
        """Source length of each pair of a split, in order."""
        return [self.length(pair.source) for pair in getattr(self, split)]

    def display(self, text: str) -> str:
        """A text as a person would write it: no blank before a mark, a capital first."""
        if self.unit != "word":
            return text
        text = _BEFORE_MARK.sub(r"\1", text)
        return text[:1].upper() + text[1:]


def language_name(code: str) -> str:
    """English name of a language code, or the code itself where we have none."""
    return LANGUAGES.get(code.lower(), code)


def bleu_tokenizer(language: str, targets: list[str]) -> str:
    """Sacrebleu's tokeniser for a target language, by name or code, or by looking at the text.

    ``"zh"`` for Chinese, ``"char"`` for Japanese and Korean (whose own tokenisers need another
    package), else ``"13a"``, the WMT standard.
    """
    if language in ("zh", "Chinese"):
        return "zh"
    if language in ("ja", "ko", "Japanese", "Korean"):
        return "char"
    sample = "".join(targets[:200])
    han = sum("\u4e00" <= sign <= "\u9fff" for sign in sample)
    return "zh" if han > 0.3 * len(sample) else "13a"
