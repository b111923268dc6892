"""The Hugging Face Hub's data sets, with a stand-in for the package that downloads them."""

import sys
import types

import pytest

from experiments.data.text import TextSpec, load
from experiments.errors import UsageError


class Rows(list):
    """What ``load_dataset`` gives for a split, as far as it is used."""

    def select(self, numbers):
        return Rows(self[i] for i in numbers)


def words(i):
    return f"word{chr(97 + i // 26)}{chr(97 + i % 26)}"


COLUMNS = Rows({"en": f"{words(i)}  e", "de": f"{words(i)} d"} for i in range(100))
NESTED = Rows({"translation": {"de": f"{words(i)} d", "en": f"{words(i)} e"}} for i in range(100))


@pytest.fixture
def hub(monkeypatch):
    """Installs a ``datasets`` that gives, or raises, what the test says; returns its calls."""

    def install(answer):
        calls = []

        def load_dataset(*args, **options):
            calls.append((args, options))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setitem(
            sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset)
        )
        return calls

    return install


def loaded(spec, **options):
    return load(TextSpec(spec, **{"valid_size": None, **options}))


def error(spec, **options):
    with pytest.raises(UsageError) as caught:
        loaded(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"--data {spec}: ")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hf:bentrevett/multi30k", ("bentrevett/multi30k", None, None)),
        ("hf:wmt/wmt14:de-en", ("wmt/wmt14", "de-en", None)),
        ("hf:a/b@refs/convert/parquet", ("a/b", None, "refs/convert/parquet")),
        ("hf:IWSLT/iwslt2017:iwslt2017-de-en@v1", ("IWSLT/iwslt2017", "iwslt2017-de-en", "v1")),
    ],
)
def test_specs(hub, spec, expected):
    calls = hub({"train": COLUMNS})
    loaded(spec)
    assert calls == [(expected[:2], {"revision": expected[2]})]


@pytest.mark.parametrize("spec", ["hf:", "hf::de-en", "hf:a/b:", "hf:a/b@"])
def test_bad_specs(spec):
    assert "not of the form hf:NAME[:CONFIG][@REVISION]" in error(spec)


def test_columns_named_by_language(hub):
    calls = hub({"train": COLUMNS, "validation": Rows(COLUMNS[:3]), "test": Rows(COLUMNS[3:5])})
    data = loaded("hf:bentrevett/multi30k@main", train_size=20)
    assert calls == [(("bentrevett/multi30k", None), {"revision": "main"})]
    assert (len(data.train), len(data.valid), len(data.test)) == (20, 3, 2)
    assert (data.test[0].source, data.test[0].target) == ("wordad e", "wordad d")
    assert (data.source_language, data.target_language) == ("English", "German")
    assert "20 of 100 training rows taken. 20 train, 3 valid, 2 test pairs" in data.provenance


def test_a_translation_column_without_held_out_splits(hub):
    calls = hub({"train": NESTED})
    data = loaded("hf:wmt/wmt14:de-en", languages="de-en")
    assert calls == [(("wmt/wmt14", "de-en"), {"revision": None})]
    assert (len(data.train), len(data.valid), len(data.test)) == (90, 5, 5)
    assert data.train[0].source.endswith(" d")
    assert "valid and test split off train" in data.provenance


def test_rows_without_text_are_left_out(hub):
    rows = Rows([*COLUMNS, {"en": None, "de": "x"}, {"en": " ", "de": "x"}])
    hub({"train": rows})
    data = loaded("hf:x/y")
    assert sum(len(s) for s in (data.train, data.valid, data.test)) == 100


def test_other_languages(hub):
    rows = Rows({"en": f"{words(i)} e", "fr": f"{words(i)} f", "id": i} for i in range(40))
    hub({"train": Rows({"en": r["en"], "fr": r["fr"]} for r in rows)})
    assert loaded("hf:x/y").target_language == "French"
    hub({"train": Rows({"text": "x"} for _ in range(40))})
    assert (
        error("hf:x/y") == "which languages? Choose a source and a target of text with --languages"
    )
    hub({"train": rows})
    assert error("hf:x/y", languages="en-zh") == "no language 'zh'; it has en, fr, id"


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error("hf:x/y").startswith("needs the package datasets: pip install datasets")


def test_missing_and_empty_splits(hub):
    hub({"test": COLUMNS})
    assert error("hf:x/y") == "no split 'train'; it has test"
    hub({"train": COLUMNS, "test": Rows()})
    assert error("hf:x/y") == "the split 'test' is empty; it needs at least one pair"


class DatasetNotFoundError(FileNotFoundError):
    pass


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ConnectionError("Couldn't reach 'x/y'"), "no connection to the Hub: check the net"),
        (TimeoutError("slow"), "no connection to the Hub: check the net"),
        (DatasetNotFoundError("Dataset 'x/y' doesn't exist"), "the Hub has no such data set"),
        (RuntimeError("Dataset scripts are no longer supported, but found y.py"),
         "try @refs/convert/parquet"),
        (ValueError("BuilderConfig 'q' not found. Available: ['a']"), "name one of its configurat"),
        (KeyError("strange"), "the Hub's data set could not be read"),
    ],
)  # fmt: skip
def test_what_can_go_wrong_on_the_way(hub, raised, said):
    hub(raised)
    message = error("hf:x/y")
    assert said in message
    assert type(raised).__name__ in message
