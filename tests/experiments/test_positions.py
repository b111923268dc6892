"""The study of positions: every scheme is what its name says, and the report."""

import json

import numpy as np
import pytest
from flax import nnx

from experiments import schemes
from experiments.__main__ import main
from experiments.data import tasks
from experiments.models import reader
from experiments.studies import positions

pytestmark = pytest.mark.usefixtures("as_users_run")

SIZE = reader.Size(layers=1, heads=2, features=8)


def model(scheme, tested=8):
    layer = schemes.layer(scheme, trained=8, tested=tested, width=8, head_depth=4)
    added = schemes.position_embedding(scheme)
    return reader.Reader(SIZE, layer, position_embedding=added, length=16, rngs=nnx.Rngs(0))


def test_the_command_line_knows_every_scheme():
    assert positions.SCHEMES == schemes.SCHEMES
    assert set(positions.TASKS) < set(tasks.TASKS)


def test_a_causal_model_does_not_see_the_padding():
    made = tasks.TASKS["copy"](np.random.default_rng(0), 2, 4)
    short, long = (tasks.causal(made, total)["symbols"] for total in (8, 16))
    for scheme in ("sinusoidal", "rotary"):
        reading = nnx.jit(model(scheme))
        np.testing.assert_allclose(reading(short), reading(long)[:, :8], atol=1e-5)


def test_schemes_differ_and_none_knows_no_order():
    symbols = np.array([[[1, 0], [2, 0], [3, 0]], [[2, 0], [1, 0], [3, 0]]], np.int32)
    out = {s: np.asarray(nnx.jit(model(s))(symbols)) for s in ("none", "alibi", "learned")}
    # The last query sees both lists as one bag, unless it is told of positions.
    np.testing.assert_allclose(*out["none"][:, 2], atol=1e-6)
    for scheme in ("alibi", "learned"):
        assert np.abs(np.subtract(*out[scheme][:, 2])).max() > 1e-3


def test_stretched_schemes_are_the_plain_ones_at_the_trained_length():
    plain = schemes.layer("rotary", trained=8, tested=8, width=8, head_depth=4)(0)
    for scheme in ("rotary-linear", "rotary-ntk", "rotary-yarn"):
        assert schemes.trained_as(scheme) == "rotary"
        at = {
            tested: schemes.layer(scheme, trained=8, tested=tested, width=8, head_depth=4)(0)
            for tested in (8, 16)
        }
        assert repr(at[8]["positions"]) == repr(plain["positions"])
        assert repr(at[16]["positions"]) != repr(plain["positions"])


@pytest.mark.thorough
def test_the_study_trains_tests_and_reports(tmp_path):
    folder = tmp_path / "run"
    small = "--preset quick --length 4 --ratios 2 --steps 3 --batch-size 4"
    given = ["--schemes", "rotary", "rotary-yarn", "log-n", "--tasks", "copy"]
    assert main(["positions", *small.split(), *given, "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert document["ratios"] == [1, 2]  # the trained length is always there
    assert document["trained_length"] == 4
    rows = document["accuracy"]["copy"]
    assert list(rows) == ["rotary", "rotary-yarn", "log-n"]
    assert all(len(row) == 2 and len(row[0]) == 1 for row in rows.values())
    # One model is tested as both; at the trained length they are one.
    assert [m["scheme"] for m in document["models"]] == ["rotary", "log-n"]
    assert rows["rotary"][0] == rows["rotary-yarn"][0] == [document["models"][0]["accuracy"]]
    losses = {(t["scheme"], t["ratio"]): t["valid_loss"] for t in document["models"][0]["tested"]}
    assert losses["rotary", 2] != losses["rotary-yarn", 2]
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 1
    for words in (
        "2108.12409",
        "other data, other scale: compare the shape",
        "Quick: one seed",
        "No scheme has learnt copying in 3 steps",
        "2 × 4",
    ):
        assert words in page
