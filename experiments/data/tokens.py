"""Text to ids and back: a closed vocabulary of words, or sentencepiece for real text.

Both have the same four special ids: padding 0, begin 1, end 2, unknown 3. ``encode`` adds none of
them; the batches do.

References:
    Kudo and Richardson 2018, SentencePiece, 1808.06226; its unigram model: Kudo 2018, 1804.10959.
"""

import collections
import dataclasses
import io
from collections.abc import Iterable, Sequence

from experiments.data.text import Dataset
from experiments.errors import UsageError

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
_MOST_SENTENCES = 200_000  # that a sentencepiece model is trained on


def content(ids: Iterable[int]) -> list[int]:
    """Return the ids before the first ``EOS``, without ``PAD`` and ``BOS``.

    Example:
        >>> content([1, 7, 8, 2, 9, 0])
        [7, 8]
    """
    ids = [int(i) for i in ids]
    end = ids.index(EOS) if EOS in ids else len(ids)
    return [i for i in ids[:end] if i not in (PAD, BOS)]


@dataclasses.dataclass(frozen=True)
class WordTokenizer:
    """A closed vocabulary, one id a word.

    Attributes:
        words: the vocabulary after the special ids.

    Example:
        >>> tokenizer = WordTokenizer.train(["a dog sleeps", "a cat sleeps"])
        >>> tokenizer.decode(tokenizer.encode("a cat sleeps"))
        'a cat sleeps'
        >>> tokenizer.encode("a bird")
        [4, 3]
    """

    words: tuple[str, ...]
    _ids: dict[str, int] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {w: i for i, w in enumerate(self.words, len(SPECIALS))})

    @classmethod
    def train(cls, texts: Iterable[str]) -> "WordTokenizer":
        """Return the vocabulary of ``texts``, by falling frequency and then by code point."""
        counts = collections.Counter(word for text in texts for word in text.split(" "))
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))))

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""
        return len(SPECIALS) + len(self.words)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return [self._ids.get(word, UNK) for word in text.split(" ")]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, up to the first ``EOS``."""
        return " ".join(self.labels(content(ids)))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """One label an id, for the axes of a figure."""
        names = (*SPECIALS, *self.words)
        return [names[int(i)] for i in ids]


class PieceTokenizer:
    """A sentencepiece model.

    Args:
        model: the serialised model, trained with the four special ids.
    """

    def __init__(self, model: bytes) -> None:
        import sentencepiece

        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    @classmethod
    def train(cls, texts: Sequence[str], *, size: int) -> "PieceTokenizer":
        """Train a unigram model of at most ``size`` pieces."""
        try:
            import sentencepiece
        except ImportError as error:
            raise UsageError(
                "real text needs the package sentencepiece: "
                "pip install 'attention_jax[experiments]'"
            ) from error
        buffer = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=buffer, model_type="unigram",
            vocab_size=size, hard_vocab_limit=False, character_coverage=0.9995,
            normalization_rule_name="identity",  # or Chinese commas would become Latin ones
            pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK,
            num_threads=1,  # so that two runs give the same model
            minloglevel=2,
        )  # fmt: skip
        return cls(buffer.getvalue())

    @property
    def size(self) -> int:
        """Number of ids, special ones included."""
        return self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, up to the first ``EOS``."""
        return self._processor.decode(content(ids))

    def labels(self, ids: Iterable[int]) -> list[str]:
        """One label an id, for the axes of a figure."""
        return [self._processor.id_to_piece(int(i)) for i in ids]


Tokenizer = WordTokenizer | PieceTokenizer


def train_tokenizers(dataset: Dataset, *, size: int) -> tuple[Tokenizer, Tokenizer]:
    """Return source and target tokenizer, from the train split alone.

    Where the unit is a word, token i of an encoded text is word i of it, so that gold links between
    words hold for tokens. ``size`` bounds the pieces of each sentencepiece model.
    """
    sides = [p.source for p in dataset.train], [p.target for p in dataset.train]
    if dataset.unit == "word":
        return WordTokenizer.train(sides[0]), WordTokenizer.train(sides[1])
    step = -(-len(dataset.train) // _MOST_SENTENCES)
    source, target = (PieceTokenizer.train(side[::step], size=size) for side in sides)
    return source, target
