"""The bench: the table is sound, nothing is timed of a kernel that is wrong, and the report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.plan import KERNELS
from experiments.__main__ import main
from experiments.bench import exact, table
from experiments.bench.contest import Case, Limit, Ratio, compiled, gradient, normal
from experiments.studies import bench

pytestmark = pytest.mark.usefixtures("as_users_run")


def test_every_name_in_the_table_is_there():
    cases = table.table()
    assert len({case.name for case in cases}) == len(cases) >= 12
    for case in cases:
        for ratio in case.ratios:
            assert {ratio.of, ratio.to} <= set(case.contestants), case.name
            assert set(ratio.at_most) <= set(case.passes), case.name
        for limit in case.limits:
            assert limit.of in case.contestants
            assert limit.which in case.passes


@pytest.mark.parametrize("form", [exact.textbook_additive, exact.tiled_additive])
def test_the_additive_contestants_compute_one_thing(form):
    arguments = exact.additive_arguments(512, hidden=3, depth=4)()
    both = (jax.jit(f)(*arguments) for f in (form, exact.additive))
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-5)


def test_the_gradient_is_of_every_floating_argument():
    x, ids = jnp.arange(3.0), jnp.arange(3)
    (got,) = gradient(lambda x, ids: x * ids)(x, ids)
    np.testing.assert_allclose(got, x * ids**2)


def tiny():
    arguments = exact.qkv(1, 8, 1, depth=4)
    contestants = exact.peers(arguments)
    contestants.pop("torch", None)
    aims = {"forward": 1e9, "gradient": 1e-9}
    return [
        Case("tiny", "T 8", contestants, [Ratio("ours", "jax.nn", aims)], sized="quick"),
        Case(
            "sizes",
            "compiled only",
            {"ours": compiled(aj.attend, arguments)},
            limits=[Limit("ours", "gradient", "compile", 1e9)],
            passes=("gradient",),
            run=False,
            sized="quick",
        ),
        Case("long", "not in quick", {}, sized="full"),
    ]


def run(folder):
    assert main(["bench", "--preset", "quick", "--rounds", "1", "--out", str(folder)]) == 0
    return json.loads((folder / "results.json").read_text()), (folder / "report.html").read_text()


@pytest.mark.thorough
def test_it_measures_and_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "table", tiny)
    monkeypatch.setattr("experiments.studies.bench._kernels", lambda: ["dense"])
    document, page = run(tmp_path / "run")
    assert document["conformance"] == {"dense": None}
    assert [case["name"] for case in document["cases"]] == ["tiny", "sizes"]
    forward, backward = document["cases"][0]["rows"]
    assert (forward["reached"], backward["reached"]) == (True, False)
    assert forward["value"] > 0
    assert document["cases"][1]["passes"]["gradient"]["temporaries"]["ours"] > 0
    for words in ("2 of 3 targets are reached", "ours / jax.nn", "Not reached: tiny"):
        assert words in page


@pytest.mark.thorough
def test_of_a_wrong_kernel_nothing_is_timed(tmp_path, monkeypatch):
    right = KERNELS["dense"].run

    def wrong(*arguments):
        result = right(*arguments)
        return result._replace(out=result.out * 1.001)

    monkeypatch.setattr(table, "table", tiny)
    monkeypatch.setattr("experiments.studies.bench._kernels", lambda: ["dense"])
    monkeypatch.setattr(KERNELS["dense"], "run", wrong)
    jax.clear_caches()
    document, page = run(tmp_path / "run")
    jax.clear_caches()
    assert "max error" in document["conformance"]["dense"]
    assert document["cases"] == []
    assert "dense does not conform, so nothing is timed" in page


def test_a_kernel_for_some_requests_is_compared_with_the_dense_one(monkeypatch):
    for kernel in ("flash", "short", "single_query"):
        assert bench._unlike_dense(kernel) is None
    right = KERNELS["flash"].run

    def wrong(*arguments):
        result = right(*arguments)
        return result._replace(out=result.out * 1.1)

    monkeypatch.setattr(KERNELS["flash"], "run", wrong)
    jax.clear_caches()
    assert "is off by" in bench._unlike_dense("flash")
    jax.clear_caches()


def test_an_unknown_case_is_one_line(capsys):
    assert main(["bench", "--cases", "dot-256", "dot-257"]) == 2
    assert "--cases dot-257 unknown; choose from dot-256" in capsys.readouterr().err


def test_normal_arrays_have_their_dtype():
    assert normal(0, (2, 3), dtype=jnp.bfloat16)[0].dtype == jnp.bfloat16
