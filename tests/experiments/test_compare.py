"""The main job on a tiny scale: what it writes, going on after a kill, real sentences."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.__main__ import main

ROOT = Path(__file__).parents[2]
REAL = Path(__file__).parent / "data" / "help.en-de.tsv"
TINY = ["--preset", "quick", "--steps", "12", "--train-size", "60", "--test-size", "14"]
TINY += ["--batch-size", "8", "--features", "16", "--heads", "2", "--checkpoint-every", "1"]

pytestmark = pytest.mark.usefixtures("as_users_run")


def results(folder):
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped, in a process of its own."""
    folder = tmp_path_factory.mktemp("compare") / "run"
    command = [sys.executable, "-m", "experiments", *TINY, "--scores", "none", "additive"]
    subprocess.run([*command, "--out", str(folder)], check=True, cwd=ROOT, capture_output=True)
    return folder


def test_results_hold_what_the_docs_say(whole):
    document = results(whole)
    assert document["schema"] == 2
    assert document["study"] == "compare"
    assert document["status"] == "finished"
    assert document["quick"] is True
    assert document["settings"]["steps"] == 12
    assert document["environment"]["versions"]["jax"]
    assert document["environment"]["device"]["platform"] == "cpu"
    assert document["data"]["aligned"] is True
    used, left_out = document["data"]["sentences"], document["data"]["left_out_as_too_long"]
    assert left_out["train"] > 0
    assert {split: used[split] + left_out[split] for split in used} == {
        "train": 60, "valid": 256, "test": 14,
    }  # fmt: skip
    assert document["data"]["lengths"]["train"][1] == document["data"]["longest_trained"]
    assert f" {used['train']} training and " in document["data"]["summary"]
    assert list(document["summary"]) == ["none", "additive"]
    for score, row in document["summary"].items():
        assert len(row["bleu"]) == len(row["chrf"]) == len(row["step_milliseconds"]) == 1
        assert all(0 <= bucket["bleu"][0] <= 100 for bucket in row["by_length"])
        assert (
            sum(b["sentences"] for b in row["by_length"]) == document["data"]["sentences"]["test"]
        )
        assert row["temporaries"][0] > 0
        looks = score != "none"
        assert (row["alignment_error"][0] is not None) == looks
        assert (row["entropy"][0] is not None) == looks
    for model in document["models"]:
        assert model["train"]["steps"] == 12
        assert model["train"]["loss"][-1][0] == 12
        assert model["train"]["observed"][-1]["step"] == 12
        assert model["test"]["translations"]
    drawn = document["models"][1]["test"]["attention"][0]
    assert len(drawn["weights"]) == len(drawn["target"])
    for row in drawn["weights"]:
        assert len(row) == len(drawn["source"])
        assert sum(row) == pytest.approx(1, abs=0.01)


def test_every_key_of_the_results_is_in_the_docs(whole):
    page = (ROOT / "docs" / "experiments.md").read_text()
    document = results(whole)
    for key in [*document, *document["data"], *document["summary"]["additive"]]:
        if key not in ("summary", "name", "source_language", "target_language", "seeds"):
            assert f"`{key}`" in page, f"{key} is not in docs/experiments.md"


def test_the_report_tells_of_the_sentences_used(whole):
    page, data = (whole / "report.html").read_text(), results(whole)["data"]
    low, high = data["lengths"]["train"]
    assert f"{data['sentences']['train']} of {low}–{high} words to train on" in page
    assert "of 3 to 25 words" not in page
    assert data["lengths"]["test"][1] <= high < 20
    for words in ("what lies beyond", "up to 20 words", "beyond the"):
        assert words not in page


def test_the_report_is_one_file_for_people(whole):
    page = (whole / "report.html").read_text()
    # Nothing is loaded from elsewhere: pictures are inlined, there is no script, link or import.
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(s.startswith(("data:image/png;base64,", "#")) for s in sources)
    assert not re.search(r"<script|<link|@import|url\(", page)
    pictures = re.findall(r"<img [^>]*>", page)
    assert len(pictures) == len(list((whole / "figures").glob("*.png"))) >= 4
    assert all(re.search(r'alt="[^"]{20,}"', picture) for picture in pictures)
    for words in (
        "The question",
        "The answer",
        "What was run",
        "Quick: one seed",
        "1703.03906",
        "1409.0473",
        "1508.04025",
        "other data, other scale: compare the shape",
        "Self-attention is the scaled dot product in all of them",
    ):
        assert words in page
    assert "None" not in page
    assert "nan" not in re.sub(r"base64,[^\"]*", "", page)
    anchors = set(re.findall(r'id="([^"]*)"', page))
    assert {s[1:] for s in sources if s.startswith("#")} <= anchors


@pytest.mark.thorough
def test_after_a_kill_it_goes_on_to_the_same_numbers(whole, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "experiments", *TINY, "--scores", "none", "additive"]
    process = subprocess.Popen(
        [*command, "--out", str(folder)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    # Killed while the second model is in training: the first is finished.
    training = folder / "checkpoints" / "additive-seed0"
    while process.poll() is None and not any(p.name.isdigit() for p in _inside(training)):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = folder / "cells" / "none-seed0.json"
    written = finished.stat().st_mtime_ns
    assert not (folder / "cells" / "additive-seed0.json").exists()
    assert results(folder)["status"] == "unfinished"

    # In a process of its own, as the run it is compared with: tests here take other kernels.
    resume = [sys.executable, "-m", "experiments", "compare", "--out", str(folder), "--resume"]
    subprocess.run(resume, check=True, cwd=ROOT, capture_output=True)
    assert finished.stat().st_mtime_ns == written
    assert results(folder)["sessions"] == 2
    for one, other in zip(results(whole)["models"], results(folder)["models"], strict=True):
        for curve in ("loss", "gradient_norm", "observed"):
            assert one["train"][curve] == other["train"][curve]
        assert one["test"] == other["test"]


def _inside(folder):
    return list(folder.iterdir()) if folder.is_dir() else []


def test_a_finished_run_can_be_taken_up_for_its_report(whole):
    before = results(whole)
    (whole / "report.html").unlink()
    assert main(["--out", str(whole), "--resume"]) == 0
    assert (whole / "report.html").exists()
    assert results(whole)["models"] == before["models"]


def test_it_trains_on_real_sentences(tmp_path):
    folder = tmp_path / "run"
    arguments = [*TINY, "--data", str(REAL), "--pieces", "120", "--scores", "scaled_dot"]
    assert main([*arguments, "--train-size", "300", "--test-size", "40", "--out", str(folder)]) == 0
    document = results(folder)
    assert document["data"]["unit"] == "subword"
    assert document["data"]["target_language"] == "German"
    loss = document["models"][0]["train"]["loss"]
    assert loss[-1][1] < loss[0][1]
    assert document["models"][0]["test"]["alignment_error"] is None
