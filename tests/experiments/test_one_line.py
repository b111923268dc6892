"""What the machine or a file refuses: one line and an exit code, no traceback and no hang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main

ROOT = Path(__file__).parents[2]
SMALL = [
    "scaling",
    "--preset",
    "quick",
    "--depths",
    "4",
    "--train-depths",
    "8",
    "--steps",
    "20",
    "--pairs",
    "4",
    "--queries",
    "2",
]

pytestmark = pytest.mark.usefixtures("as_users_run")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.tsv").symlink_to("loop.tsv")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.tsv")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero.tsv").symlink_to("/dev/zero")
    (tmp_path / "one.tsv").write_text(
        "a b c d e f g\th i j k\ttrain\n" * 3 + "a\tb\tvalid\nc\td\ttest"
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("mine")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "results.json")
    return tmp_path


LONG = "x" * 5000
CASES = [
    (["--data", ""], "--data needs a value that is not empty"),
    (["--data="], "--data needs a value that is not empty"),
    (["--data", "/dev/null"], "--data /dev/null: is a device"),
    (["--data", "/dev/zero"], "--data /dev/zero: is a device"),
    (["--data", "zero.tsv"], "--data zero.tsv: is not a regular file"),
    (["--data", "pipe.tsv"], "--data pipe.tsv: is not a regular file"),
    (["--data", "pipe"], "--data pipe: is a device or a pipe"),
    (["--data", "loop.tsv"], "symbolic links"),
    (["--data", LONG], "--data xxx"),
    (["--data", LONG + ".tsv"], "--data xxx"),
    (["--data", f"{LONG}.en,{LONG}.de"], "--data xxx"),
    (["--data", "one.tsv", "--max-length", "4"], "--data one.tsv, split"),
    (["--data", "a\0b.tsv"], "is not text"),
    (["--out", ""], "--out needs a value that is not empty"),
    (["scaling", "--out", "."], "--out . is not empty"),
    (["scaling", "--out", "mine"], "--out mine is not empty and holds no run"),
    (["scaling", "--out", "file"], "--out file cannot be made a folder"),
    (["scaling", "--out", "file/x"], "--out file/x cannot be made a folder"),
    (["scaling", "--out", "loop"], "--out loop cannot be made a folder"),
    (["scaling", "--out", "loop/x"], "--out loop/x cannot be made a folder"),
    (["scaling", "--out", LONG], "cannot be made a folder: File name too long"),
    (["scaling", "--out", "a\udcff"], "is not text"),
    (["scaling", "--out", "loop", "--resume"], "--resume: loop cannot be read"),
    (["scaling", "--out", LONG, "--resume"], "cannot be read: File name too long"),
    (["scaling", "--out", "mine", "--resume"], "holds no run.json"),
    (["doctor", "loop"], "loop has no results.json"),
    (["doctor", LONG], "has no results.json"),
    (["doctor", "piped"], "results.json is no regular file"),
    (["doctor", "mine"], "mine has no results.json"),
    (["--steps", "9" * 5000], "must be a whole number"),
    (["--steps", "9" * 30], "--steps is too large"),
    (["--seeds", "100000000"], "--seeds 100000000 is too large"),
    ([LONG], "study 'xxx"),
    (["--" + LONG], "option --xxx"),
    (["--preset", LONG], "--preset 'xxx"),
]


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=lambda x: " ".join(x)[:40])
def test_it_is_one_line(here, capsys, arguments, words):
    there = sorted(os.listdir(here))
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error
    assert len(error) < 600
    assert sorted(os.listdir(here)) == there
    assert (here / "mine" / "report.html").read_text() == "mine"
    assert os.listdir(here / "mine") == ["report.html"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"3", b"\xff", b"{}", b"[" * 100_000, b'{"study": []}',
     b'{"study": "scaling", "status": "finished", "trained": [{}]}',
     b'{"study": "scaling", "status": "finished", "trained": 3, "started": "", "settings": {}}'],
)  # fmt: skip
def test_a_damaged_result_is_not_examined(here, capsys, content):
    (here / "mine" / "results.json").write_bytes(content)
    assert main(["doctor", "mine", "--out", "examined"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (here / "examined").exists()


def run(here, command, **environment):
    """Run a command line of the shell in which ``$RUN`` is the program."""
    words = {"RUN": f"{sys.executable} -m experiments", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        ["bash", "-c", command], cwd=here, env={**os.environ, **words}, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.thorough
def test_a_folder_may_have_any_name(here):
    name = "é [/b][red] :smile:"
    done = run(here, f"$RUN {' '.join(SMALL)} --out '{name}'", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"report: \\xe9 [/b][red] :smile:/report.html" in done.stdout
    assert json.loads((here / name / "results.json").read_text())["status"] == "finished"


@pytest.mark.thorough
def test_a_checkpoint_is_found_in_a_folder_of_any_name(here):
    name = "a [/b] *?"
    long = SMALL[:]
    long[long.index("20")] = "5000"
    begun = run(here, f"timeout -s TERM 30 $RUN {' '.join(long)} --out '{name}'")
    assert begun.returncode == 124  # what timeout returns, whatever the program does
    assert begun.stderr.count(b"\n") == 1
    assert f"--out '{name}' --resume".encode() in begun.stderr
    states = list((here / name / "checkpoints").glob("*/*/state"))
    assert not states or all(any(state.iterdir()) for state in states)


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [["compare", "--help"], [*SMALL, "--out", "r"]])
def test_a_closed_pipe_is_one_line(here, arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "experiments", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=here, env=environment, stdout=write, stderr=subprocess.PIPE, timeout=300,
        check=False,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(b"error: standard output was closed")
    assert (b"--out r --resume" in done.stderr) == ("r" in arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"$RUN {' '.join(SMALL)} --out r > /dev/full", b"No space left on device"),
        (f"$RUN {' '.join(SMALL)} --batch-size 2000000000 --out r", b"out of memory"),
    ],
)
def test_what_the_system_refuses_is_one_line(here, command, words):
    done = run(here, command)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(b"error: ")
    assert words in done.stderr


@pytest.mark.thorough
def test_it_runs_without_a_standard_output(here):
    done = run(here, f"$RUN {' '.join(SMALL)} --out r >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (here / "r" / "report.html").exists()


@pytest.mark.thorough
def test_a_full_disk_is_named_first_and_the_run_goes_on_afterwards(here):
    """A limit on the size of files stands for the disk: it is met in a checkpoint."""
    arguments = "scaling --preset quick --depths 4 --train-depths 64 --steps 110"
    assert run(here, f"$RUN {arguments} --out whole").returncode == 0
    full = run(here, f"ulimit -f 24; $RUN {arguments} --out r")
    assert full.returncode == 2
    assert full.stderr.count(b"\n") == 1
    assert full.stderr.startswith(b"error: File too large; ")
    assert b"--out r --resume" in full.stderr
    assert run(here, "$RUN scaling --out r --resume").returncode == 0
    one, two = (json.loads((here / n / "results.json").read_text()) for n in ("whole", "r"))
    assert [m["loss"] for m in one["trained"]] == [m["loss"] for m in two["trained"]]
