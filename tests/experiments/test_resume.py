"""Going on with a run: with the same data, versions and settings, and nothing damaged, or not."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main

ROOT = Path(__file__).parents[2]
SMALL = ["--preset", "quick", "--steps", "4", "--train-size", "60", "--test-size", "14"]
SMALL += ["--batch-size", "8", "--features", "16", "--heads", "2", "--pieces", "60"]
SMALL += ["--scores", "dot", "additive"]

pytestmark = [pytest.mark.usefixtures("as_users_run"), pytest.mark.thorough]


def write_rows(file, *, turned=False):
    rows = []
    for i in range(80):
        one, two = f"word{chr(97 + i % 26)} here {'or there ' * (i % 3)}", f"Wort {i} hier"
        rows.append(f"{one}\t{two[::-1] if turned else two}")
    file.write_text("\n".join(rows))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of compare on a file, and the file."""
    folder = tmp_path_factory.mktemp("resume")
    write_rows(folder / "f.tsv")
    command = [sys.executable, "-m", "experiments", "compare", *SMALL]
    command += ["--data", str(folder / "f.tsv"), "--out", str(folder / "run")]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it whose second model is not trained yet."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace(str(finished), str(tmp_path)))
    (tmp_path / "run" / "cells" / "additive-seed0.json").unlink()
    return tmp_path / "run"


def state(folder):
    """Every file with its digest, but for the lock."""
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in folder.rglob("*")
        if f.is_file() and f.name != "run.lock"
    }


def refused(folder, capsys, *arguments, resume=True):
    """Go on with a run, which is refused in one line and changes nothing; return the line."""
    before = state(folder)
    command = ["compare", "--out", str(folder), *(["--resume"] if resume else []), *arguments]
    capsys.readouterr()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert state(folder) == before
    return error


def test_it_goes_on_where_nothing_changed(run, capsys):
    assert main(["compare", "--out", str(run), "--resume"]) == 0
    results = json.loads((run / "results.json").read_text())
    assert [m["score"] for m in results["models"]] == ["dot", "additive"]
    assert results["sessions"] == 2


def test_data_that_has_changed_is_refused_by_name(run, capsys):
    write_rows(run.parent / "f.tsv", turned=True)
    assert "f.tsv has changed" in refused(run, capsys)
    write_rows(run.parent / "f.tsv")
    with (run.parent / "f.tsv").open("a") as rows:
        rows.write("\none more row that no seed may choose\teine Zeile mehr")
    assert "f.tsv has changed" in refused(run, capsys)


def test_data_that_is_gone_is_named(run, capsys):
    (run.parent / "f.tsv").unlink()
    assert "f.tsv: no such file" in refused(run, capsys)


def test_data_may_change_its_time_but_not_its_rows(run):
    write_rows(run.parent / "f.tsv")
    assert main(["compare", "--out", str(run), "--resume"]) == 0


@pytest.mark.parametrize("package", ["jax", "numpy", "flax", "source"])
def test_other_versions_are_refused_by_name(run, capsys, package):
    record = json.loads((run / "run.json").read_text())
    assert record["versions"][package]
    record["versions"][package] = "0.0.1"
    (run / "run.json").write_text(json.dumps(record))
    said = refused(run, capsys)
    assert package in said
    assert "0.0.1" in said


def test_cells_without_a_record_are_not_taken_up(run, capsys):
    (run / "run.json").unlink()
    said = refused(run, capsys)
    assert "no run.json" in said
    assert "leave --resume out" not in said
    assert "is not empty" in refused(run, capsys, *SMALL, "--steps", "9", resume=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "default"], "--preset quick, not default"),
        (["--learning-rate", "0.004"], "--learning-rate 0.005, not 0.004"),
        (["--steps=900"], "--steps 4, not 900"),
        (["--scores", "dot"], "--scores dot additive, not dot"),
        (["--scores", "none", "dot", "scaled_dot", "additive"], "--scores dot additive, not none"),
        (["--data", "grammar"], "--data"),
        (["--seeds", "3"], "--seeds 1, not 3"),
        (["--test-longer", "True"], "--test-longer False, not True"),
    ],
)
def test_an_option_that_is_given_is_compared_also_where_it_is_the_default(
    run, capsys, arguments, words
):
    assert words in refused(run, capsys, *arguments)


def test_options_that_are_given_as_they_were_are_no_matter(run):
    same = [*SMALL, "--data", str(run.parent / "f.tsv"), "--learning-rate", "5e-3"]
    assert main(["compare", *same, "--out", str(run), "--resume"]) == 0


DAMAGE = {
    "empty": b"",
    "cut": None,
    "list": b"[]",
    "object": b"{}",
    "null": b"null",
    "number": b"3",
    "string": b'"run"',
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["run.json", "cells/dot-seed0.json", "cells/data.json"])
def test_a_damaged_record_is_refused_and_nothing_is_deleted(run, capsys, file, damage):
    content = (run / file).read_bytes()
    (run / file).write_bytes(content[: len(content) // 2] if damage == "cut" else DAMAGE[damage])
    before = state(run / "cells")
    record = (run / "run.json").read_bytes()
    assert main(["compare", "--out", str(run), "--resume"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert Path(file).name in error
    assert state(run / "cells") == before
    assert file != "run.json" or (run / "run.json").read_bytes() == record


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", "four"), ("steps", -1), ("steps", [4]), ("scores", "dot"), ("scores", [1]),
     ("seeds", 1.5), ("learning_rate", None), ("preset", "fast"), ("test_longer", "yes")],
)  # fmt: skip
def test_a_record_with_settings_that_cannot_be_is_refused(run, capsys, name, value):
    record = json.loads((run / "run.json").read_text())
    record["settings"][name] = value
    (run / "run.json").write_text(json.dumps(record))
    assert "run.json is damaged: --" in refused(run, capsys)


@pytest.mark.parametrize("change", ["more", "less"])
def test_a_record_of_another_version_of_the_study_is_refused(run, capsys, change):
    record = json.loads((run / "run.json").read_text())
    if change == "more":
        record["settings"]["momentum"] = 0.9
    else:
        del record["settings"]["shapes"]
    (run / "run.json").write_text(json.dumps(record))
    assert f"--{'momentum' if change == 'more' else 'shapes'}" in refused(run, capsys)


@pytest.mark.parametrize("key", ["study", "settings", "sessions", "versions", "data"])
def test_a_record_that_lacks_a_part_is_refused(run, capsys, key):
    record = json.loads((run / "run.json").read_text())
    record[key] = 3
    (run / "run.json").write_text(json.dumps(record))
    assert "run.json is damaged" in refused(run, capsys)


def test_a_cell_with_another_number_is_refused(run, capsys):
    file = run / "cells" / "dot-seed0.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1', 1))
    assert main(["compare", "--out", str(run), "--resume"]) == 2
    assert "dot-seed0.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_record_that_is_no_regular_file_is_refused(run, capsys, make):
    (run / "run.json").unlink()
    make(run / "run.json")
    assert main(["compare", "--out", str(run), "--resume"]) == 2
    error = capsys.readouterr().err
    assert "run.json is no regular file" in error
    assert error.count("\n") == 1


def test_one_process_at_a_time_works_in_a_folder(run, capsys):
    code = "import sys; from pathlib import Path; from experiments.core.lock import lock\n"
    code += "lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as other:
        assert other.stdout.readline() == "locked\n"
        said = refused(run, capsys)
        assert f"in use by another process (number {other.pid})" in said
        other.kill()
    assert main(["compare", "--out", str(run), "--resume"]) == 0


def test_a_gzip_file_is_known_by_its_text(run, capsys):
    """The same rows under the same name, compressed another way, are the same data."""
    file = run.parent / "g.tsv.gz"
    rows = (run.parent / "f.tsv").read_bytes()
    file.write_bytes(gzip.compress(rows, 1))
    folder = run.parent / "zipped"
    arguments = ["compare", *SMALL, "--data", str(file), "--out", str(folder)]
    assert main(arguments) == 0
    (folder / "cells" / "additive-seed0.json").unlink()
    file.write_bytes(gzip.compress(rows, 9))
    assert main(["compare", "--out", str(folder), "--resume"]) == 0
