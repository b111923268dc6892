"""A model that diverges: every study reports it, and no figure or table stumbles over NaN."""

import json
import math
import re

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.report import figures, look
from experiments.report.blocks import diverged, duration, known, mean, mean_sd, memory, number

pytestmark = pytest.mark.usefixtures("as_users_run")

NAN, INF = math.nan, math.inf
SENTENCES = "--train-size 60 --test-size 12 --batch-size 8 --heads 2 --preset quick"
RUNS = {
    "compare": f"--learning-rate 1e20 --steps 20 --scores dot additive --features 16 {SENTENCES}",
    "scaling": "--learning-rate 1e20 --steps 20 --depths 4 --train-depths 8 --preset quick",
    "prune": f"--learning-rate 1e20 --steps 20 --features 16 --points 1 {SENTENCES}",
    "stability": "--learning-rates 1e38 --steps 20 --forms clipping --preset quick",
    "distill": f"--learning-rate 1e20 --steps 10 --teacher-steps 10 --teacher-features 16 "
    f"--features 8 --ways logits {SENTENCES}",
    "positions": "--learning-rate 1e20 --steps 20 --schemes none --preset quick",
    "long": "--learning-rate 1e20 --steps 20 --names full --lengths 64 --trained full "
    "--preset quick",
}
"""The studies that train; the others have no loss."""


@pytest.mark.parametrize(
    "study", [pytest.param(s, marks=() if s == "stability" else pytest.mark.thorough) for s in RUNS]
)
def test_a_study_whose_models_diverge_says_so(study, tmp_path):
    folder = tmp_path / "run"
    assert main([study, *RUNS[study].split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text(), parse_constant=pytest.fail)
    assert document["status"] == "finished"
    page = re.sub(r"base64,[^\"]*", "", (folder / "report.html").read_text())
    models = document.get("models") or document["trained"]
    broken = [m.get("train", m)["diverged_at"] for m in models]
    assert any(step is not None for step in broken)
    said = re.findall(r"<li>[^<]* diverged: the loss was not finite at step (\d+)", page)
    assert said == [str(step) for step in broken if step is not None]
    assert not re.search(r"\b(nan|inf|None)\b", page.replace("None of", ""))
    assert main(["doctor", str(folder), "--out", str(tmp_path / "examined")]) == 0


@pytest.mark.parametrize("value", [NAN, INF, -INF, None])
@pytest.mark.parametrize("log", [False, True])
def test_curves_without_a_finite_point_say_so(value, log, tmp_path):
    broken = {"dot": [[(1, value), (2, value)]], "none": [[], []], "additive": []}
    whole = {"dot": [[(1, 1.0), (2, value)]], "none": [[(1, 2.0)]], "additive": [[(1, 3.0)]]}
    for name, panels in {
        "all": [("a", broken), ("b", {})],
        "one": [("a", broken), ("b", whole)],
        "none": [],
    }.items():
        if panels:
            file = tmp_path / f"{name}.svg"
            figures.curves(file, panels, x="x", y="y", log_x=log, log_y=log, markers=True)
    text = (tmp_path / "all.svg").read_text()
    assert "<!-- unscaled dot (diverged) -->" in text
    assert text.count("<!-- diverged -->") == 2
    text = (tmp_path / "one.svg").read_text()
    assert text.count("<!-- diverged -->") == 1
    assert "<!-- unscaled dot -->" in text


@pytest.mark.parametrize("value", [NAN, INF, None, 0.0, -1.0])
def test_other_figures_take_what_is_not_a_number(value, tmp_path):
    file = tmp_path / "f.png"
    figures.bars(file, ["1", "2"], {"a": [[value], []], "b": [[1.0, value], [2.0]]}, x="", y="")
    figures.bars(file, [], {}, x="", y="")
    figures.ratios(file, {"a": {"f": (value, 1.0)}, "b": {"f": (1.0, value)}})
    figures.ratios(file, {"a": {"f": (value, value)}})
    weights = np.array([[value, 0.5], [0.5, 0.5]], object)
    look.alignments(file, [("t", weights)], ["a", "b"], ["c", "d"])
    for row in ([value, value], [1.0, value]):
        panel = "t", {"a": [list(zip((64, 128), row, strict=True))]}
        figures.curves(
            file, [panel, panel], x="T", y=("ms", "MiB"), log_x=True, log_y=True, slopes=True,
            labels={"a": "a"}, styles={"a": ("#000000", "-", "o")},
        )  # fmt: skip
        figures.dots(file, [("t", 0.1, {"a": row})], {"a": ("#000000", "-", "o")})
    assert file.read_bytes().startswith(b"\x89PNG")


def test_words_for_what_is_not_a_number():
    assert known([1.0, None, NAN, INF, -INF, 2]) == [1.0, 2]
    assert mean([None, NAN]) is None
    assert mean([1.0, NAN, 3.0]) == 2.0
    assert [number(v, ".1f") for v in (1.25, None, NAN, INF)] == ["1.2", "–", "–", "–"]
    assert mean_sd([NAN, INF, None]) == "–"
    assert mean_sd([1.0, INF]) == "1.0 (1 of 2)"
    assert [duration(v) for v in (None, NAN, INF)] == ["–"] * 3
    assert [memory(v) for v in (None, NAN, INF)] == ["–"] * 3
    assert diverged([("dot, seed 0,", 3), ("dot, seed 1,", None)]) == [
        "Dot, seed 0, diverged: the loss was not finite at step 3; its figures are those of the "
        "last model before it."
    ]
