"""The scaling study: the table without training, the task, and the report."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import untrained
from experiments.__main__ import main
from experiments.data import tasks
from experiments.models import recall
from experiments.report.published import UNTRAINED

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("as_users_run")


@pytest.mark.parametrize("depth", UNTRAINED)
def test_the_table_without_training_comes_out_as_given(depth):
    sd, dot, scaled, additive = UNTRAINED[depth]
    draws: list[Any] = [untrained.measure(depth, seed) for seed in range(3)]
    assert np.mean([d["sd"] for d in draws]) == pytest.approx(sd, rel=0.05)
    for name, (entropy, largest, jacobian) in {
        "dot": dot,
        "scaled_dot": scaled,
        "additive": additive,
    }.items():
        # With four hidden units the additive score differs much from draw to draw.
        near = 0.08 if (name, depth) == ("additive", 4) else 0.03
        mean = {k: np.mean([d[name][k] for d in draws]) for k in draws[0][name]}
        assert mean["entropy"] == pytest.approx(entropy, abs=near)
        assert mean["largest"] == pytest.approx(largest, abs=near)
        if jacobian is not None:
            assert mean["jacobian"] == pytest.approx(jacobian, abs=near)


def test_row_statistics_of_weights_done_by_hand():
    weights = np.array([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]], np.float32)
    found = untrained.row_statistics(weights)
    for row, p in enumerate(weights):
        jacobian = np.diag(p) - np.outer(p, p)
        assert found["jacobian"][row] == pytest.approx(np.linalg.norm(jacobian), abs=1e-6)
        assert found["largest"][row] == p.max()
        logs = [x * np.log(x) for x in p if x > 0]
        assert found["entropy"][row] == pytest.approx(-sum(logs) / np.log(2), abs=1e-6)


def test_a_problem_asks_for_what_it_told():
    made = tasks.recall(np.random.default_rng(0), size=5, pairs=7, queries=3, words=11)
    for keys, values, asked, answers in zip(*made.values(), strict=True):
        assert len(set(keys.tolist())) == 7
        told = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert [told[key] for key in asked.tolist()] == answers.tolist()


@pytest.mark.thorough
def test_the_study_trains_and_reports(tmp_path):
    folder = tmp_path / "run"
    arguments = "--preset quick --depths 4 16 --train-depths 8 --steps 30 --pairs 4 --queries 2"
    assert main(["scaling", *arguments.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert [row["depth"] for row in document["untrained"]] == [4, 16]
    assert {row["name"]: row["scale"] for row in document["trained"]} == pytest.approx(
        {"no scale": 1.0, "too weak": 8**-0.25, "1/√d": 8**-0.5, "too strong": 1 / 8}
    )
    for row in document["trained"]:
        assert len(row["loss"]) == len(row["gradient_norm"]) == 30
        assert row["observed"][0]["step"] == 0
        assert row["observed"][-1]["step"] == 30
        assert row["observed"][-1]["valid_loss"] < row["observed"][0]["valid_loss"]
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 4
    for words in ("1706.03762", "4, given"):
        assert words in page


@pytest.mark.thorough
def test_ctrl_c_is_a_pause(tmp_path):
    small = ["--preset", "quick", "--train-depths", "8", "--steps", "3000", "--pairs", "4"]
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "experiments", "scaling", *small, "--out", str(folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list((folder / "checkpoints").glob("*/*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    errors = process.communicate()[1]
    assert process.returncode == 130
    assert f"--out {folder} --resume" in errors
    assert "Traceback" not in errors
    assert not list((folder / "cells").glob("depth8-p1-*"))  # the last one


def test_too_weak_a_scale_starts_sharper_than_too_strong_a_one():
    from flax import nnx

    made = tasks.recall(np.random.default_rng(0), size=16, pairs=16, queries=4, words=32)
    entropies = []
    for scale in (1.0, 64**-0.25, 64**-0.5, 1 / 64):
        model = recall.Recall(32, 32, 64, scale, rngs=nnx.Rngs(0))
        entropies.append(float(recall.observe(model, made)["entropy"]))
    assert entropies == sorted(entropies)
    assert entropies[0] < 0.3
    assert entropies[-1] > 0.95
