"""Run folders: cells are kept whole, a run is taken up with its own settings."""

import dataclasses
import json

import pytest

from experiments.core.run import RunFolder, finite, resume_options
from experiments.errors import UsageError
from experiments.studies.cost import Cost
from experiments.studies.scaling import Scaling


def opened(tmp_path, **more):
    options = Cost(out=tmp_path / "run", preset="quick", **more).resolved()
    return RunFolder.open(options)


def test_a_finished_cell_is_not_computed_again(tmp_path):
    folder = opened(tmp_path)
    assert not folder.has("one")
    assert folder.cell("one", lambda: {"a": (1, 2.5)}) == {"a": [1, 2.5]}
    assert folder.has("one")
    assert folder.cell("one", lambda: pytest.fail("computed again")) == {"a": [1, 2.5]}


def test_a_cell_that_fails_leaves_nothing(tmp_path):
    folder = opened(tmp_path)

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        folder.cell("one", fails)
    assert not folder.has("one")
    assert list((folder.path / "cells").iterdir()) == []


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    opened(tmp_path)
    with pytest.raises(UsageError, match="already holds a run; add --resume"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UsageError, match=r"--out .*run"):
        opened(tmp_path)


def test_an_empty_folder_will_do(tmp_path):
    (tmp_path / "run").mkdir()
    assert opened(tmp_path).path == tmp_path / "run"


def test_a_run_is_taken_up_with_its_own_settings(tmp_path):
    first = opened(tmp_path, rounds=2, lengths=(16,))
    options = resume_options(Cost(out=tmp_path / "run", resume=True), ())
    assert dataclasses.replace(options, resume=False) == first.options
    again = RunFolder.open(options)
    assert again.sessions == 2
    assert again.started == first.started


def test_other_settings_are_refused(tmp_path):
    opened(tmp_path, rounds=2)
    with pytest.raises(UsageError, match="started with --rounds 2, not 7"):
        resume_options(Cost(out=tmp_path / "run", resume=True, rounds=7), {"rounds"})
    with pytest.raises(UsageError, match="a run of cost, not of scaling"):
        resume_options(Scaling(out=tmp_path / "run", resume=True), ())


def test_runs_without_a_name_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = Cost(preset="quick").resolved()
    paths = {RunFolder.open(options).path for _ in range(3)}
    assert len(paths) == 3
    assert {path.parent.as_posix() for path in paths} == {"runs/cost"}


def test_results_have_a_head_and_are_json_without_nan(tmp_path):
    folder = opened(tmp_path)
    folder.write_results({"value": float("nan"), "list": [1.0, float("inf")]}, finished=False)
    text = (folder.path / "results.json").read_text()
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["value"] is None
    assert document["list"] == [1.0, None]
    assert document["status"] == "unfinished"
    assert document["quick"] is True
    assert {"schema", "study", "settings", "environment", "started", "seconds"} <= set(document)
    assert {"versions", "device", "system"} <= set(document["environment"])


def test_finite_keeps_what_is_a_number():
    assert finite({"a": (1, 2.0, -float("inf")), "b": "NaN"}) == {"a": [1, 2.0, None], "b": "NaN"}
