"""The study of stability: what is swept is swept, and the report."""

import json

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.data import tasks
from experiments.models import recall
from experiments.studies import stability
from experiments.studies.stability import Stability

pytestmark = pytest.mark.usefixtures("as_users_run")


@pytest.mark.parametrize(("form", "most"), [("QK norm", 8**0.5), ("soft cap", 2.0)])
def test_a_norm_and_a_cap_bound_the_logits(form, most):
    options = Stability(depth=8, cap=2.0)
    made = tasks.recall(np.random.default_rng(0), size=2, pairs=4, queries=2, words=64)
    found = {f: recall.observe(stability._model(options, f, 0), made) for f in ("no scale", form)}
    assert found["no scale"]["max_logit"] > 4
    assert found[form]["max_logit"] <= most + 1e-5


@pytest.mark.thorough
def test_the_study_sweeps_and_reports(tmp_path):
    folder = tmp_path / "run"
    small = "--preset quick --steps 30 --pairs 4 --queries 2 --depth 8 --learning-rates 0.01 3"
    forms = ["--forms", "1/√d", "clipping"]
    assert main(["stability", *small.split(), *forms, "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert document["learning_rates"] == [0.01, 3]
    assert list(document["summary"]) == ["1/√d", "clipping"]
    models = {(m["form"], m["learning_rate"]): m for m in document["models"]}
    assert len(models) == 4
    for (form, rate), model in models.items():
        assert model["observed"][0]["step"] == 0
        at = document["learning_rates"].index(rate)
        assert document["summary"][form]["entropy"][at] == [model["observed"][-1]["entropy"]]
    # The learning rate and the clipping reach the optimiser, though one step was compiled for all.
    plain, clipped = (models[form, 0.01] for form in ("1/√d", "clipping"))
    assert plain["loss"][0] == clipped["loss"][0]
    assert plain["loss"] != clipped["loss"]
    assert plain["observed"][-1]["valid_loss"] < plain["observed"][0]["valid_loss"]
    assert models["1/√d", 3]["observed"][-1]["max_logit"] > 20
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 4
    for words in ("2303.06296", "other data, other scale: compare the shape", "quick: one seed"):
        assert words in page
    # A run of this study is one that the doctor can examine.
    assert main(["doctor", str(folder), "--out", str(tmp_path / "examined")]) == 0
    found = json.loads((tmp_path / "examined/results.json").read_text())
    assert [m["findings"] for m in found["models"]] == [m["findings"] for m in document["models"]]
    assert found["left_out"] == []
