"""Tokenizers: round trips, special ids, and saving."""

import pathlib

import pytest

from experiments.data import (
    BOS,
    EOS,
    PAD,
    UNK,
    Dataset,
    Pair,
    load,
    load_tokenizer,
    train_tokenizers,
)
from experiments.data.tokens import PieceTokenizer, SymbolTokenizer

SHARED = pathlib.Path(__file__).parents[2] / ".." / "shared" / "data"
TEXT = [
    f"Open the {thing} and choose the {what}, please."
    for thing in ("menu", "page", "table", "list")
    for what in ("first entry", "last row", "button", "other one", "colour", "size")
]


def test_symbols_are_ordered_by_frequency_and_then_by_letter():
    words = SymbolTokenizer.train(["b a c", "b a"], separator=" ")
    assert words.symbols == ("a", "b", "c")
    assert words.size == 7
    assert words.encode("c a zebra") == [6, 4, UNK]
    assert words.labels([PAD, BOS, EOS, UNK, 4]) == ["<pad>", "<bos>", "<eos>", "<unk>", "a"]


def test_decoding_stops_at_the_end_sign():
    words = SymbolTokenizer(("a", "b"), " ")
    assert words.decode([BOS, 4, 5, EOS, 4, PAD]) == "a b"
    assert words.decode([PAD, EOS]) == ""


def test_characters():
    signs = SymbolTokenizer.train(["3月5日"], separator="")
    assert signs.decode(signs.encode("5月3日")) == "5月3日"
    assert len(signs.encode("5月3日")) == 4


def test_alignment_holds_for_tokens_of_closed_vocabularies():
    data = load("dates", train_size=50, valid_size=5, test_size=5)
    source, target = train_tokenizers(data)
    pair = data.train[0]
    from_ids, to_ids = source.encode(pair.source), target.encode(pair.target)
    for s, t in pair.gold()[0]:
        assert source.labels([from_ids[s]]) == [pair.source[s]]
        assert target.labels([to_ids[t]]) == [pair.target[t]]


@pytest.fixture(scope="module")
def pieces():
    return PieceTokenizer.train(TEXT, size=60)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_pieces_round_trip_and_have_the_four_special_ids(kind):
    pieces = PieceTokenizer.train(TEXT, size=60, kind=kind)
    assert pieces.size <= 60
    for text in TEXT:
        ids = pieces.encode(text)
        assert min(ids) > UNK
        assert pieces.decode([BOS, *ids, EOS, 7, 8]) == text
    assert UNK in pieces.encode("Ω")
    assert pieces.labels(pieces.encode("the"))[0].startswith("▁")


def test_training_twice_gives_the_same_model(pieces):
    assert PieceTokenizer.train(TEXT, size=60).model == pieces.model


def test_saved_tokenizers_load(tmp_path, pieces):
    words = SymbolTokenizer.train(["größer , 日"], separator=" ")
    for name, tokenizer in (("words.json", words), ("pieces.model", pieces)):
        tokenizer.save(tmp_path / name)
        again = load_tokenizer(tmp_path / name)
        assert type(again) is type(tokenizer)
        assert again.size == tokenizer.size
        assert again.encode(TEXT[0]) == tokenizer.encode(TEXT[0])
    assert load_tokenizer(tmp_path / "words.json") == words


def test_only_the_train_split_is_learnt_from():
    data = Dataset(
        "d", "a", "b", (Pair("x y", "z"),), (Pair("v", "v"),), (Pair("t", "t"),), "word", ""
    )
    source, target = train_tokenizers(data)
    assert source == SymbolTokenizer(("x", "y"), " ")
    assert target == SymbolTokenizer(("z",), " ")


def test_chinese_marks_survive():
    data = SHARED / "help.en-zh.tsv.gz"
    if not data.exists():
        pytest.skip(f"{data} is not here: real sentences are no part of the repository")
    dataset = load(str(data), train_size=1500, test_size=100)
    _, target = train_tokenizers(dataset, size=2000)
    known = [p.target for p in dataset.test if UNK not in target.encode(p.target)]
    assert len(known) > 60
    assert sum("，" in text for text in known) > 5
    assert all(target.decode(target.encode(text)) == text for text in known)
