"""TSV and plain files: what is read, how it is split, and each one-line error."""

import gzip
import os
import pathlib
import re

import pytest

from experiments.data.read import languages_of
from experiments.data.text import TextSpec, load, split_key
from experiments.errors import UsageError

REAL = pathlib.Path(__file__).parent / "data" / "help.en-de.tsv"
ROWS = [f"word{chr(97 + i // 26)}{chr(97 + i % 26)} here\tWort {i} hier" for i in range(200)]


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def loaded(data, seed=0, **sizes):
    return load(TextSpec(str(data), **{"valid_size": None, **sizes}), seed)


def error(data, **options):
    with pytest.raises(UsageError) as caught:
        loaded(data, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"--data {data}: ")


@pytest.mark.parametrize("name", ["x.en-de.tsv", "x.en-de.tsv.gz"])
def test_a_tsv_with_splits(tmp_path, name):
    rows = "One.\tEins.\ttrain\nTwo.\tZwei.\ttrain\n\nThree.\tDrei.\tvalid\nFour.\tVier.\ttest\n"
    data = loaded(write(tmp_path / name, rows))
    assert [(p.source, p.target) for p in data.train] == [("One.", "Eins."), ("Two.", "Zwei.")]
    assert [p.target for p in data.valid + data.test] == ["Drei.", "Vier."]
    assert (data.source_language, data.target_language) == ("English", "German")
    assert (data.unit, data.bleu_tokenize, data.aligned) == ("subword", "13a", False)
    assert "2 train, 1 valid, 1 test pairs" in data.provenance


def test_line_ends_byte_order_mark_and_odd_separators(tmp_path):
    text = "\ufeffOne\u2028more.\tEins.\ttrain\r\nTwo.\tZwei.\tvalid\r\nX\tY\ttest"
    data = loaded(write(tmp_path / "x.tsv", text))
    assert data.train[0].source == "One\u2028more."
    assert data.valid[0].target == "Zwei."


def test_a_tsv_without_splits_is_dealt_out_by_hash(tmp_path):
    data = loaded(write(tmp_path / "x.tsv", "\n".join(ROWS)))
    assert (len(data.train), len(data.valid), len(data.test)) == (180, 10, 10)
    again = loaded(write(tmp_path / "y.tsv", "\n".join(reversed(ROWS))), seed=4)
    for split in ("train", "valid", "test"):
        assert set(getattr(data, split)) == set(getattr(again, split))


def test_near_duplicates_stay_together(tmp_path):
    rows = [
        f"Look at page {i} of {name}.\tS. {i}"
        for name in ("Anna", "Bert", "Cleo")
        for i in range(9)
    ]
    data = loaded(write(tmp_path / "x.tsv", "\n".join(rows)))
    keys = [{split_key(p.source) for p in getattr(data, s)} for s in ("train", "valid", "test")]
    assert [len(k) for k in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 3


def test_two_plain_files(tmp_path):
    sides = [[row.split("\t")[i] for row in ROWS] for i in (0, 1)]
    sides[0][5] = ""
    spec = ",".join(
        write(tmp_path / f"t.{c}", "\n".join(side))
        for c, side in zip(("en", "de"), sides, strict=True)
    )
    data = loaded(spec)
    assert sum(len(s) for s in (data.train, data.valid, data.test)) == 199
    assert data.target_language == "German"
    pairs = {p.source: p.target for s in (data.train, data.valid, data.test) for p in s}
    assert pairs["wordac here"] == "Wort 2 hier"


def test_sizes_and_seed(tmp_path):
    path = write(tmp_path / "x.tsv", "\n".join(ROWS))
    one, two = (loaded(path, seed=s, train_size=50, valid_size=3, test_size=4) for s in (0, 1))
    assert (len(one.train), len(one.valid), len(one.test)) == (50, 3, 4)
    assert one.train != two.train
    assert (one.valid, one.test) == (two.valid, two.test)
    assert loaded(path, seed=1, train_size=50).train == two.train


def test_nobody_aligned_them(tmp_path):
    data = loaded(write(tmp_path / "x.tsv", "\n".join(ROWS)))
    assert not data.aligned
    assert data.train[0].alignment is None


def test_languages(tmp_path):
    assert languages_of("help.en-zh.tsv.gz") == ("en", "zh")
    assert languages_of("/data/en-de/news.tsv") is None
    assert languages_of("en.txt,de.txt") == ("en", "de")
    assert languages_of("some-name.tsv") is None
    chinese = write(
        tmp_path / "x.tsv", "\n".join(f"{chr(97 + i)}\t今天天气好{i}" for i in range(26))
    )
    assert loaded(chinese).bleu_tokenize == "zh"
    data = loaded(chinese, languages="fr-ja")
    assert (data.source_language, data.target_language) == ("French", "Japanese")
    assert data.bleu_tokenize == "char"


def test_length_counts_words_and_signs(tmp_path):
    data = loaded(write(tmp_path / "x.tsv", "\n".join(ROWS)))
    assert data.length("Two words") == 2
    assert data.length("按 Enter 键。") == 4
    assert data.display("a b .") == "a b ."


ROW = "a row is source<TAB>target or source<TAB>target<TAB>train|valid|test"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\nno tab here\n", f"line 2: no tab in this row; {ROW}"),
        ("a\tb\tc\td\n", f"line 1: 4 columns; {ROW}"),
        ("a\tb\n\t x\n", f"line 2: the source is empty; {ROW}"),
        ("a\t\n", f"line 1: the target is empty; {ROW}"),
        ("a\tb\ttrain\nc\td\tdev\n", "line 2: unknown split 'dev'; it must be train "
         "or valid or test"),
        ("a\tb\ttrain\nc\td\n", "line 2: 2 columns where the rows before have 3; "
         "name the split in every row or in none"),
        ("\n\n", f"no rows; {ROW}"),
        ("", f"no rows; {ROW}"),
        ("a\tb\ttrain\nc\td\ttest\n", "no row belongs to the split 'valid'; "
         "each of train, valid and test needs one (or leave the third column out)"),
        ("a\tb\nA!\tc\n", "1 different sources cannot fill train, valid, test; "
         "it needs at least 3"),
    ],
)  # fmt: skip
def test_bad_rows(tmp_path, text, message):
    path = write(tmp_path / "bad.tsv", text)
    assert error(path) == message


def test_bad_files(tmp_path):
    assert re.fullmatch(r"no such file \(looked in /.*\)", error("none.tsv"))
    assert "missing.en: no such file" in error(f"{tmp_path}/missing.en,{tmp_path}/missing.de")
    (tmp_path / "folder.tsv").mkdir()
    assert error(tmp_path / "folder.tsv") == "is a folder; give the file itself"
    os.mkfifo(tmp_path / "pipe.tsv")
    assert error(tmp_path / "pipe.tsv") == "is not a regular file"
    (tmp_path / "loop.tsv").symlink_to(tmp_path / "loop.tsv")
    assert error(tmp_path / "loop.tsv").startswith("cannot be read: ")
    assert error("x" * 300 + ".tsv").startswith("cannot be read: ")
    assert error("/dev/zero,/dev/null") == "/dev/zero: is not a regular file"
    assert error("/dev/null").startswith("is a device or a pipe, not a file")
    assert error("").startswith("is empty; known data: grammar")
    assert error(tmp_path).startswith("is a folder; known data: grammar, FILE.tsv")
    (tmp_path / "x.tsv.gz").write_bytes(b"plain text\tnot zipped\n")
    assert "not a whole gzip file" in error(tmp_path / "x.tsv.gz")
    (tmp_path / "y.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 1000)[:-20])
    assert "not a whole gzip file" in error(tmp_path / "y.tsv.gz")
    (tmp_path / "latin.tsv").write_bytes("ä\tö\n".encode("latin-1"))
    assert "byte 0 is not UTF-8; save it as UTF-8" in error(tmp_path / "latin.tsv")


def test_bad_pairs_of_files(tmp_path):
    one, two = write(tmp_path / "a.en", "x\ny\n"), write(tmp_path / "a.de", "u\n")
    assert "2 and 1 lines; line i of the one must translate line i" in error(f"{one},{two}")
    assert "is written SOURCE,TARGET" in error(f"{one},{two},{one}")
    blank = write(tmp_path / "b.de", "\n\n")
    assert "no line has text on both sides" in error(f"{one},{blank}")
    assert "one plain file is only one side" in error(one)


def test_unknown_names():
    assert error("gramar").startswith("unknown data (did you mean grammar?); known: grammar, FILE")
    assert error("mystery").startswith("unknown data; known: grammar, FILE.tsv")
    assert error("some/where.txt").startswith("no such file; known data: grammar")
    assert error("grammar", languages="en") == (
        "--languages 'en' must be SOURCE-TARGET, as in en-de"
    )
    assert error("grammar", languages="en-fr") == "it has no languages to choose, so not en-fr"


def test_sentences_of_a_help_text():
    data = loaded(REAL)
    assert (len(data.train), len(data.valid), len(data.test)) == (93, 19, 18)
    assert (data.source_language, data.target_language) == ("English", "German")
    assert "0 of the test sources also occur in train" in data.provenance
    assert 4 <= min(data.lengths("test")) <= max(data.lengths("test")) <= 12
    assert all(pair.source and pair.target for pair in data.train)
