"""Tokenizers: round trips, special ids, and saving."""

import pytest

from experiments.data.grammar import Pair
from experiments.data.text import Dataset, TextSpec, load
from experiments.data.tokens import (
    BOS,
    EOS,
    PAD,
    UNK,
    PieceTokenizer,
    WordTokenizer,
    train_tokenizers,
)

TEXT = [
    f"Open the {thing} and choose the {what}, please."
    for thing in ("menu", "page", "table", "list")
    for what in ("first entry", "last row", "button", "other one", "colour", "size")
]


def test_symbols_are_ordered_by_frequency_and_then_by_letter():
    words = WordTokenizer.train(["b a c", "b a"])
    assert words.words == ("a", "b", "c")
    assert words.size == 7
    assert words.encode("c a zebra") == [6, 4, UNK]
    assert words.labels([PAD, BOS, EOS, UNK, 4]) == ["<pad>", "<bos>", "<eos>", "<unk>", "a"]


def test_decoding_stops_at_the_end_sign():
    words = WordTokenizer(("a", "b"))
    assert words.decode([BOS, 4, 5, EOS, 4, PAD]) == "a b"
    assert words.decode([PAD, EOS]) == ""


def test_alignment_holds_for_tokens_of_closed_vocabularies():
    data = load(TextSpec(train_size=50, valid_size=5, test_size=7))
    source, target = train_tokenizers(data, size=0)
    pair = data.train[0]
    from_ids, to_ids = source.encode(pair.source), target.encode(pair.target)
    assert pair.alignment
    for s, t in pair.alignment:
        assert source.labels([from_ids[s]]) == [pair.source.split(" ")[s]]
        assert target.labels([to_ids[t]]) == [pair.target.split(" ")[t]]


@pytest.fixture(scope="module")
def pieces():
    return PieceTokenizer.train(TEXT, size=60)


def test_pieces_round_trip_and_have_the_four_special_ids(pieces):
    assert pieces.size <= 60
    for text in TEXT:
        ids = pieces.encode(text)
        assert min(ids) > UNK
        assert pieces.decode([BOS, *ids, EOS, 7, 8]) == text
    assert UNK in pieces.encode("Ω")
    assert pieces.labels(pieces.encode("the"))[0].startswith("▁")


def test_training_twice_gives_the_same_model(pieces):
    assert PieceTokenizer.train(TEXT, size=60).model == pieces.model


def test_only_the_train_split_is_learnt_from():
    data = Dataset(
        "d", "a", "b", (Pair("x y", "z"),), (Pair("v", "v"),), (Pair("t", "t"),), "word", ""
    )
    source, target = train_tokenizers(data, size=0)
    assert source == WordTokenizer(("x", "y"))
    assert target == WordTokenizer(("z",))


def test_chinese_marks_survive():
    texts = [
        f"请打开{what}，然后选择{which}。" for what in "表格页面文件" for which in "颜色大小名称"
    ]
    target = PieceTokenizer.train(texts, size=60)
    for text in texts:
        assert target.decode(target.encode(text)) == text
        assert UNK not in target.encode(text)
