"""The doctor: planted troubles are found in a run's curves, a healthy run has none."""

import json

import pytest

from experiments import curve_checks
from experiments.__main__ import main

pytestmark = pytest.mark.usefixtures("as_users_run")


def norms(values):
    return [[step, value] for step, value in enumerate(values, 1)]


def model(name, seed=0, **changes):
    """A healthy model of a run of scaling, of 40 steps."""
    steps = range(0, 41, 4)
    fall = [4.0 - 0.09 * step for step in steps]
    made = {
        "depth": 64,
        "name": name,
        "seed": seed,
        "loss": [[step + 1, 4.0 - 0.09 * step] for step in range(40)],
        "gradient_norm": norms([1.0] * 40),
        "observed": [
            {"step": s, "valid_loss": v, "entropy": 0.87 - 0.002 * s, "max_logit": 3.0}
            for s, v in zip(steps, fall, strict=True)
        ],
        "diverged_at": None,
    }
    return made | changes


def observed(**curves):
    """The looks of a healthy model, some of their curves others: a function of the step."""
    rows = model("")["observed"]
    return [row | {name: curve(row["step"]) for name, curve in curves.items()} for row in rows]


def run(folder, *models, **changes):
    head = {"study": "scaling", "status": "finished", "started": "2026-01-01T00:00", "settings": {}}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({**head, "trained": models, **changes}))
    return folder


SICK = {
    "no_scale": {"observed": observed(entropy=lambda s: 0.1)},
    "too_even": {"observed": observed(entropy=lambda s: 0.999)},
    "entropy_collapse": {
        "observed": observed(
            entropy=lambda s: 0.9 * 0.5 ** (s / 4),
            max_logit=lambda s: 3 + 4.0 * s,
            valid_loss=lambda s: 4.0 - s / 20,  # it learns a little, and no more
        )
    },
    "not_learning": {"observed": observed(valid_loss=lambda s: 4.0 + s / 40)},
    "not_finite": {"diverged_at": 33, "observed": observed()[:9]},
    "gradient_leap": {"gradient_norm": norms([1.0] * 30 + [50.0] + [1.0] * 9)},
}


@pytest.mark.parametrize("trouble", SICK)
def test_a_planted_trouble_is_found_and_nothing_else(trouble):
    results = {"study": "scaling", "trained": [model("planted", **SICK[trouble])]}
    (found,) = [curve_checks.examine(model) for model in curve_checks.trained_models(results)]
    assert found.names == (trouble,)
    assert found.findings[0].remedy
    if trouble == "not_finite":
        assert found.findings[0].numbers["step"] == 33
    if trouble == "gradient_leap":
        assert found.findings[0].numbers["step"] == 31


@pytest.mark.parametrize("absent", [{}, {"entropy": None}])
def test_what_a_run_does_not_record_is_not_found_but_told(absent):
    looks = [{"step": s, "valid_loss": 4.0 - s / 20} | absent for s in range(0, 41, 4)]
    results = {"study": "scaling", "trained": [model("bare", observed=looks)]}
    (found,) = [curve_checks.examine(model) for model in curve_checks.trained_models(results)]
    assert not found
    assert len(found.left_out) == 2


def test_the_doctor_prints_and_reports(tmp_path, capsys):
    sick = run(
        tmp_path / "sick",
        model("well"),
        model("ill", **SICK["not_finite"]),
        model("ill", 1, **SICK["no_scale"]),
    )
    out = tmp_path / "out"
    assert main(["doctor", str(sick), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 findings in 3 attentions" in said
    assert "training broke at step 33" in said
    assert "remedy" in said
    document = json.loads((out / "results.json").read_text())
    assert document["study"] == "doctor"
    assert [f["name"] for f in document["findings"]] == ["not_finite", "no_scale"]
    assert [m["findings"] for m in document["models"]] == [[], ["not_finite"], ["no_scale"]]
    page = (out / "report.html").read_text()
    assert page.count("<img") == 3
    for words in ("2 of 3 models have findings", "optax.clip_by_global_norm(1.0)", "64, ill"):
        assert words in page
    # The first seed alone, and a second opinion on what is well.
    again = tmp_path / "again"
    assert main(["doctor", str(sick), "--preset", "quick", "--out", str(again)]) == 0
    assert capsys.readouterr().out.startswith("1 finding in 2 attentions")
    document = json.loads((again / "results.json").read_text())
    assert [f["name"] for f in document["findings"]] == ["not_finite"]
    well = run(tmp_path / "well", model("well"))
    assert main(["doctor", str(well), "--out", str(tmp_path / "fine")]) == 0
    assert "nothing found in 1 attention\n" in capsys.readouterr().out
    assert "look healthy" in (tmp_path / "fine/report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"study": "cost"}, ["'cost'", "trains no model", "stability"]),
        ({"status": "unfinished"}, ["not finished", "--resume"]),
        ({"trained": []}, ["no trained model"]),
        ({"trained": [{"seed": 0}]}, ["does not have the form"]),
    ],
)
def test_a_run_that_cannot_be_examined_gets_one_line(changes, words, tmp_path, capsys):
    folder = run(tmp_path / "run", model("well"), **changes)
    refused(["doctor", str(folder), "--out", str(tmp_path / "out")], words, capsys)
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_gets_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(["doctor"], ["doctor RUN"], capsys)
    refused(["doctor", "nowhere"], ["nowhere", "no folder of a run"], capsys)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/run.json").write_text("{}")
    refused(["doctor", "begun"], ["begun", "not finished"], capsys)
    for text in ("not JSON", "[]", "{}"):
        (tmp_path / "begun/results.json").write_text(text)
        refused(["doctor", "begun"], ["results.json"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]  # nothing was made


def refused(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(word in error for word in words)
