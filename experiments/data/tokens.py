"""Text to ids and back: vocabularies of words or characters, and sentencepiece for real text.

Every tokenizer has the same four special ids: padding 0, begin 1, end 2, unknown 3. ``encode`` adds
none of them; the batches do.

References:
    Kudo 2018, Subword regularization, 1804.10959: the unigram model.
    Kudo and Richardson 2018, SentencePiece, 1808.06226.
"""

import abc
import collections
import dataclasses
import io
import itertools
import json
import pathlib
from collections.abc import Iterable, Sequence

from .dataset import DataError, Dataset

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PIECES = 4_000  # vocabulary of a sentencepiece model, each language its own


class Tokenizer(abc.ABC):
    """Text to ids and back."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of ids, specials included."""
        """Number of ids, specials included."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        """Ids of a text, without specials (but ``UNK`` for what is unknown)."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        """The text; ends at the first ``EOS``, passes over ``PAD`` and ``BOS``."""

    @abc.abstractmethod
    def labels(self, ids: Iterable[int]) -> list[str]:
        """One label an id."""
        """One short label an id, for the axes of a picture."""

    @abc.abstractmethod
    def save(self, path: pathlib.Path) -> None:
        """Writes the tokenizer to a file."""
        """Writes what :func:`load_tokenizer` needs."""


def content(ids: Iterable[int]) -> list[int]:
    """The ids before the first ``EOS``, without ``PAD`` and ``BOS``.

    Example:
        >>> content([1, 7, 8, 2, 9, 0])
        [7, 8]
    """
    kept = []
    for new in map(int, ids):
        if new == EOS:
            break
        if new not in (PAD, BOS):
            kept.append(new)
    return kept


@dataclasses.dataclass(frozen=True)
class SymbolTokenizer(Tokenizer):
    """A closed vocabulary, one id a symbol.

    Attributes:
        symbols: The vocabulary after the specials, most frequent first.
        separator: ``" "`` if a symbol is a word, ``""`` if it is a character.

    Example:
        >>> words = SymbolTokenizer.train(["a dog sleeps", "a cat sleeps"], separator=" ")
        >>> words.decode(words.encode("a cat sleeps"))
        'a cat sleeps'
        >>> words.encode("a bird")
        [4, 3]
    """

    symbols: tuple[str, ...]
    separator: str
    _ids: dict[str, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {s: i for i, s in enumerate(self.symbols, len(SPECIALS))})

    @classmethod
    def train(cls, texts: Iterable[str], *, separator: str) -> "SymbolTokenizer":
        """Every symbol of ``texts``, by falling frequency and then by code point."""
        counts = collections.Counter(
            itertools.chain.from_iterable(_symbols(t, separator) for t in texts)
        )
        return cls(tuple(sorted(counts, key=lambda s: (-counts[s], s))), separator)

    @property
    def size(self) -> int:
        """Number of ids, specials included."""
        return len(SPECIALS) + len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [self._ids.get(symbol, UNK) for symbol in _symbols(text, self.separator)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return self.separator.join(self.labels(content(ids)))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """One label an id."""
        return [
            SPECIALS[i] if i < len(SPECIALS) else self.symbols[i - len(SPECIALS)]
            for i in map(int, ids)
        ]

    def save(self, path: pathlib.Path) -> None:
        """Writes the tokenizer to a file."""
        text = json.dumps(
            {"separator": self.separator, "symbols": self.symbols}, ensure_ascii=False
        )
        path.write_text(text, encoding="utf-8")


def _symbols(text: str, separator: str) -> Sequence[str]:
    return text.split(separator) if separator else text


class PieceTokenizer(Tokenizer):
    """A sentencepiece model, trained on the train split and kept in memory.

    Args:
        model: The serialised model, trained with the four special ids.
    """

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(
        cls, texts: Sequence[str], *, size: int = PIECES, kind: str = "unigram"
    ) -> "PieceTokenizer":
        """Trains a model of at most ``size`` pieces, ``kind`` "unigram" or "bpe"."""
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                "real text needs the package sentencepiece: "
                "pip install 'attention_jax[experiments]'"
            ) from error
        buffer = io.BytesIO()
        # one thread, so that two runs give the same model
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=buffer,
            model_type=kind,
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            normalization_rule_name="identity",  # or Chinese commas would become Latin ones
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            num_threads=1,
            minloglevel=2,
        )
        return cls(buffer.getvalue())

    @property
    def size(self) -> int:
        """Number of ids, specials included."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return self._processor.decode(content(ids))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """One label an id."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def save(self, path: pathlib.Path) -> None:
        """Writes the tokenizer to a file."""
        path.write_bytes(self.model)


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """Reads what :meth:`Tokenizer.save` wrote."""
    content_bytes = path.read_bytes()
    if content_bytes.startswith(b"{"):
        fields = json.loads(content_bytes)
        return SymbolTokenizer(tuple(fields["symbols"]), fields["separator"])
    return PieceTokenizer(content_bytes)


def train_tokenizers(
    dataset: Dataset, *, size: int = PIECES, kind: str = "unigram", most: int = 200_000
) -> tuple[Tokenizer, Tokenizer]:
    """Source and target tokenizer from the train split alone.

    Args:
        dataset: Decides by its ``unit``: words, characters, or sentencepiece for subwords.
        size: Pieces of each sentencepiece model at most; a closed vocabulary is as large as it is.
        kind: "unigram" or "bpe".
        most: Sentences a sentencepiece model is trained on at most, evenly spread over the split.

    Returns:
        The two tokenizers. Where the unit is a word or a character, token i of an encoded text is
        symbol i of the text, so ``Pair.alignment`` holds for tokens as it stands.
    """
    sides = [p.source for p in dataset.train], [p.target for p in dataset.train]
    if dataset.unit != "subword":
        separator = " " if dataset.unit == "word" else ""
        source, target = (SymbolTokenizer.train(side, separator=separator) for side in sides)
        return source, target
    step = -(-len(sides[0]) // most)
    source, target = (PieceTokenizer.train(side[::step], size=size, kind=kind) for side in sides)
    return source, target
