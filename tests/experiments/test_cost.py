"""The cost study: forms are checked before they are timed, crossovers, and the report."""

import json

import jax
import jax.numpy as jnp
import pytest

from experiments.__main__ import main
from experiments.bench import forms
from experiments.core.measure import compile_for, crossover, interleaved

pytestmark = pytest.mark.usefixtures("as_users_run")


@pytest.mark.parametrize("name", forms.FORMS)
def test_every_form_agrees_with_float64(name):
    assert forms.check(name) is None


@pytest.mark.parametrize(
    "fault",
    [
        lambda q, k, v, *p: forms.textbook_dot(q, k, v) * 1.001,
        lambda q, k, v, *p: forms.textbook_dot(2 * q, k, v),
        lambda q, k, v, *p: forms.textbook_dot(q, k, jnp.where(v > 1, 0, v)),
        lambda q, k, v, *p: v,
    ],
)
def test_a_wrong_form_is_found(fault, monkeypatch):
    monkeypatch.setitem(forms.FORMS, "wrong", ("dot", fault))
    assert forms.check("wrong").startswith("out ")


def test_a_wrong_gradient_is_found(monkeypatch):
    from jax.lax import stop_gradient

    def form(q, k, v, *p):
        return forms.textbook_dot(q, stop_gradient(k), v)

    monkeypatch.setitem(forms.FORMS, "wrong", ("dot", form))
    assert "gradient of key" in forms.check("wrong")


def test_crossover_is_where_it_stays_slower():
    lengths = [1, 2, 4, 8]
    assert crossover(lengths, [1, 2, 3, 4], [2, 2, 2, 2]) == 4
    assert crossover(lengths, [3, 1, 3, 4], [2, 2, 2, 2]) == 4
    assert crossover(lengths, [3, 3, 3, 3], [2, 2, 2, 2]) == 1
    assert crossover(lengths, [1, 1, 1, 1], [2, 2, 2, 2]) is None
    assert crossover(lengths, [3, 3, 3, None], [2, 2, 2, 2]) == 1
    assert crossover(lengths, [None] * 4, [2, 2, 2, 2]) is None


def test_interleaved_medians_take_turns():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    found = interleaved(calls, rounds=3, least_seconds=0)
    assert order == ["a", "a", "b", "b", *"ababab"]
    assert all(f["low"] <= f["median"] <= f["high"] for f in found.values())


def test_temporaries_are_known_without_running():
    made = compile_for(
        forms.textbook_dot, jax.eval_shape(lambda: forms.inputs(0, 64, heads=1, depth=8, hidden=8))
    )
    assert made.temporaries >= 64 * 64 * 4
    assert made.compile_seconds > 0


@pytest.mark.thorough
def test_the_study_measures_and_reports(tmp_path):
    folder = tmp_path / "run"
    arguments = "--preset quick --lengths 32 8 --memory-lengths 128 --rounds 1 --depth 8 --hidden 4"
    assert main(["cost", *arguments.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert document["lengths"] == [8, 32]
    assert set(document["checks"].values()) == {"agrees with float64"}
    for which in ("forward", "gradient"):
        assert set(document["milliseconds"][which]) == set(forms.FORMS)
        for row in document["milliseconds"][which].values():
            assert all(value > 0 for values in row for value in values)
    assert list(document["temporaries"]) == ["8", "32", "128"]
    long = document["temporaries"]["128"]["gradient"]
    assert long["textbook additive"] > 4 * 128 * 128 * 4  # [T, S, A], float32
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 2
    for words in ("2112.05682", "other data, other scale: compare the shape", "2–3 times"):
        assert words in page


def test_a_wrong_form_has_no_numbers(tmp_path, monkeypatch):
    wrong = {
        **forms.FORMS,
        "our dot": ("dot", lambda q, k, v, *p: forms.textbook_dot(q, k, 1.01 * v)),
    }
    monkeypatch.setattr(forms, "FORMS", {n: wrong[n] for n in ("textbook dot", "our dot")})
    folder = tmp_path / "run"
    arguments = "--preset quick --lengths 8 --memory-lengths 16 --rounds 1 --depth 4 --hidden 4"
    assert main(["cost", *arguments.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert "is off by" in document["checks"]["our dot"]
    assert list(document["mean_milliseconds"]["forward"]) == ["textbook dot"]
    assert "A form was wrong and is not measured" in (folder / "report.html").read_text()
