"""Dates in English and Chinese."""

import datetime

import pytest

from experiments.data import load
from experiments.data.dates import _FORMATS, pair

MOMENT = datetime.datetime(2024, 3, 5, 14, 7)


@pytest.mark.parametrize(
    ("kind", "english", "chinese"),
    [
        (("en_US", "full", "full"), "Tuesday, March 5, 2024", "2024年3月5日星期二"),
        (("en_US", "short", "short"), "3/5/24", "2024/3/5"),
        (("en_US", "yMEd", "yMEd"), "Tue, 3/5/2024", "2024/3/5周二"),
        (("en_US", "MMMd", "MMMd"), "Mar 5", "3月5日"),
        (("en_US", "long hm", "long hm"), "March 5, 2024, 2:07 PM", "2024年3月5日 下午2:07"),
    ],
)
def test_formats(kind, english, chinese):
    found = pair(MOMENT, _FORMATS.index(kind))
    assert (found.source, found.target) == (english, chinese)


def test_links_by_hand():
    found = pair(MOMENT, _FORMATS.index(("en_US", "short", "short")))  # 3/5/24 -> 2024/3/5
    sure, possible = map(set, found.gold())
    assert sure == {(4, 2), (5, 3), (0, 5), (2, 7)}
    century = {(s, t) for s in (4, 5) for t in (0, 1)}
    slashes = {(4, 4), (5, 4), (0, 6)}
    assert possible == sure | century | slashes
    found = pair(MOMENT, _FORMATS.index(("en_US", "MMMd", "MMMd")))  # Mar 5 -> 3月5日
    sure, possible = map(set, found.gold())
    assert sure == {(4, 2)}
    assert possible == {(s, t) for s in range(3) for t in (0, 1)} | {(4, 2), (4, 3)}


@pytest.fixture(scope="module")
def data():
    return load("dates", seed=0, train_size=3000)


def test_data_set(data):
    assert (len(data.train), len(data.valid), len(data.test)) == (3000, 300, 500)
    assert (data.unit, data.bleu_tokenize, data.target_language) == ("character", "zh", "Chinese")
    assert data.aligned
    assert all(any(a <= n <= b for a, b in data.buckets) for n in data.lengths("test"))


def test_every_character_has_a_possible_link_and_at_most_one_sure_one(data):
    for found in data.test:
        sure, possible = found.gold()
        assert set(sure) <= set(possible)
        assert {t for _, t in possible} == set(range(len(found.target)))
        assert len({t for _, t in sure}) == len(sure)
        assert all(found.source[s] == found.target[t] for s, t in sure)
        assert all(s < len(found.source) for s, _ in possible)


def test_determinism_and_no_leakage(data):
    again, other = (load("dates", seed=s, train_size=3000) for s in (0, 1))
    assert again.train == data.train != other.train
    assert other.test == data.test
    trained = {p.source for d in (data, other) for p in d.train}
    assert not trained & {p.source for p in data.test + data.valid}


def test_the_target_is_a_function_of_the_source(data):
    targets = {}
    for found in data.train + data.test + load("dates", seed=1, train_size=3000).train:
        assert targets.setdefault(found.source, found.target) == found.target
