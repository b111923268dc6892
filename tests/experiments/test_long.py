"""The study of long sequences: the tasks, the fits, what is wrong is not timed, and the report."""

import json
import math

import numpy as np
import pytest

from experiments import families
from experiments.__main__ import main
from experiments.data import tasks
from experiments.fitting import exponent
from experiments.studies import long

pytestmark = pytest.mark.usefixtures("as_users_run")


def test_the_command_line_knows_every_family_and_task():
    assert long.NAMES == tuple(families.MAKERS)
    assert long.TASKS == tuple(tasks.TASKS)
    assert set(families.PATTERNS) < set(families.MAKERS)


def test_an_exponent_is_the_slope_in_log_log():
    lengths = [512, 1024, 4096]
    assert exponent(lengths, [3e-4 * n**1.5 for n in lengths]) == pytest.approx(1.5)
    noisy = [2.0, 5.0, 70.0]
    slope = np.polyfit(np.log(lengths), np.log(noisy), 1)[0]
    assert exponent(lengths, noisy) == pytest.approx(slope)
    assert exponent(lengths, [0, 4.0, 16.0]) == pytest.approx(1.0)
    assert exponent(lengths, [None, 4.0, math.nan]) is None


def written(tokens):
    return [tasks.LISTOPS_TOKENS[token] for token in tokens]


def value_of(words):
    """The value of a written expression, by taking it apart from the inside."""
    words = list(words)
    while len(words) > 1:
        close = words.index("]")
        start = max(i for i in range(close) if words[i].startswith("["))
        numbers = sorted(int(word) for word in words[start + 1 : close])
        assert len(numbers) >= 2
        middle = numbers[(len(numbers) - 1) // 2] + numbers[len(numbers) // 2]
        found = {
            "[MIN": numbers[0],
            "[MAX": numbers[-1],
            "[MED": middle // 2,
            "[SM": sum(numbers) % 10,
        }[words[start]]
        words[start : close + 1] = [str(found)]
    return int(words[0])


def test_listops_say_the_value_of_what_is_written():
    rng = np.random.default_rng(0)
    lengths = set()
    for length in (4, 9, 30) * 40:
        tokens, value = tasks.expression(rng, length, depth=3)
        assert len(tokens) <= length
        lengths.add(len(tokens))
        assert value_of(written(tokens)) == value
    assert max(lengths) > 24


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_problem_answers_what_was_told(task):
    length, places = 6, 14
    made = tasks.TASKS[task](np.random.default_rng(3), 5, length)
    assert made.inputs.shape == (5, length, 2)
    assert made.answers.shape == (5, tasks.answers_of(task, length))
    bidirectional, causal = tasks.bidirectional(made, places), tasks.causal(made, places)
    for batch in (bidirectional, causal):
        assert batch["symbols"].shape == (5, places, 2)
        assert batch["symbols"][..., 0].max() < tasks.SYMBOLS
        assert batch["symbols"][..., 1].max() <= tasks.WORDS
        asked = batch["targets"] != tasks.UNSCORED
        np.testing.assert_array_equal(batch["targets"][asked].reshape(5, -1), made.answers)
        assert asked[:, length].all()
        assert not asked[:, :length].any()
    for told, slots, answers in zip(made.inputs, made.slots, made.answers, strict=True):
        first, second = told.T
        wanted = {
            "recall": lambda f=first, s=second, q=slots: [s[f == key].item() - 1 for key in q],
            "max": lambda f=first, s=second: [s[f == f.max()].item() - 1],
            "listops": lambda f=first: [value_of(written([t for t in f if t != tasks.PAD]))],
            "copy": lambda f=first: f.tolist(),
            "reverse": lambda f=first: f[::-1].tolist(),
            "sort": lambda f=first: sorted(f.tolist()),
        }[task]()
        assert answers.tolist() == wanted
    if task in ("copy", "reverse", "sort"):  # one answer is told before the next is asked
        np.testing.assert_array_equal(
            causal["symbols"][:, length + 1 : 2 * length, 0], made.answers[:, :-1]
        )


def test_the_longest_problem_just_fits():
    for task in tasks.TASKS:
        length = tasks.longest(task, 20)
        assert length + tasks.answers_of(task, length) <= 20
        assert length + 1 + tasks.answers_of(task, length + 1) > 20
    with pytest.raises(ValueError, match="do not fit into length 3"):
        tasks.bidirectional(tasks.TASKS["copy"](np.random.default_rng(0), 1, 2), 3)


def test_a_grid_is_as_square_as_it_gets():
    assert [families.grid(n) for n in (512, 1024, 8192, 7)] == [
        (16, 32),
        (32, 32),
        (64, 128),
        (1, 7),
    ]


@pytest.mark.parametrize("name", families.MAKERS)
def test_what_is_wrong_is_found(name):
    given = families.arguments(name, 24, 8, heads=2, depth=4, seed=0)
    right = families.MAKERS[name](24, 8, 4)(*given)
    assert families.fault(name, right, given, 8) is None
    changed = right.at[0, 3, 1, 2].add(0.1 if name == "nystrom" else 0.01)
    assert "is off by" in families.fault(name, changed, given, 8)


SMALL = (
    "--preset quick --lengths 64 32 --reach 8 --depth 8 --rounds 1 --places 16 --steps 3 "
    "--batch-size 4 --names full bigbird low-rank --tasks recall --trained linear-elu"
)


@pytest.mark.thorough
def test_the_study_measures_trains_and_reports(tmp_path, monkeypatch):
    wrong = {**families.MAKERS, "low-rank": lambda length, reach, depth: lambda q, k, v, e, f: v}
    monkeypatch.setattr(families, "MAKERS", wrong)
    folder = tmp_path / "run"
    assert main(["long", *SMALL.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert document["quick"]
    assert document["lengths"] == [32, 64]
    assert "is off by" in document["checks"].pop("low-rank")
    assert document["checks"] == dict.fromkeys(("full", "bigbird"), "agrees with NumPy")
    assert set(document["fits"]) == {"full", "bigbird"}  # nothing is timed that is wrong
    for name, fit in document["fits"].items():
        times = document["milliseconds"]["forward"][name]
        assert all(value > 0 for value in times)
        assert fit == {
            "time_exponent": pytest.approx(exponent([32, 64], times)),
            "memory_exponent": exponent([32, 64], document["temporaries"]["forward"][name]),
        }
    shares = document["pairs"]["bigbird"][-1]
    assert 0 < shares["seen"] <= shares["touched"] <= shares["computed"] <= 1
    assert document["pairs"]["full"] == [None, None]
    (model,) = document["models"]
    assert [look["step"] for look in model["observed"]] == [0, 1, 2, 3]
    assert document["accuracy"] == {"recall": {"linear-elu": [model["accuracy"]]}}
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 2
    for words in (
        "2011.04006",
        "other data, other scale: compare the shape",
        "One was wrong and is not measured. low-rank",
        "Quick: one seed",
        "Fitted exponents, lengths 32 to 64",
    ):
        assert words in page
