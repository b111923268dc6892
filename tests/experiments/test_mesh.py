"""Training on meshes and in several processes gives what one device gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
LIMIT = 400  # seconds; a tenth of it does on two free cores
SMALL = ["--preset", "quick", "--steps", "20", "--batch-size", "8", "--features", "16"]
SMALL += ["--heads", "2", "--layers", "1", "--train-size", "60", "--checkpoint-every", "10"]
LM = ["lm", *SMALL, "--length", "16", "--scores", "scaled_dot", "--fetch-every", "5"]
LM += ["--observe-every", "10"]
COMPARE = ["compare", *SMALL, "--test-size", "14", "--scores", "scaled_dot"]
MESH = ["--mesh", "data=4,model=2"]


def begin(commands, devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    words = [sys.executable, str(Path(__file__).with_name("on_devices.py")), json.dumps(commands)]
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment, cwd=ROOT, text=True, **pipes)


def end(process):
    out, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def on_two(*commands):
    """Run command lines in two processes of four devices; a command is a pair, one for each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = []
    for number in range(2):
        where = ["--coordinator", f"localhost:{port}", "--processes", "2"]
        where += ["--process", str(number)]
        pair.append(begin([[*command[number], *where] for command in commands], 4))
    try:
        return [end(process) for process in pair]
    finally:
        for process in pair:
            process.kill()


def curves(folder):
    (file,) = (folder / "curves").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    observed = [row["observed"]["valid_loss"] for row in rows if "observed" in row]
    return [row["loss"] for row in steps] + observed


def assert_same(folder, other):
    np.testing.assert_allclose(curves(folder), curves(other), rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Runs on one device, and in the same process on eight."""
    at = tmp_path_factory.mktemp("mesh")
    commands = []
    for name, command in (("lm", LM), ("compare", COMPARE)):
        commands.append([*command, "--out", str(at / name)])
        commands.append([*command, *MESH, "--out", str(at / f"{name}-mesh")])
        commands.append([*command, *MESH, "--fully-sharded", "--out", str(at / f"{name}-sharded")])
    commands.append([12, *LM, "--out", str(at / "resumed")])
    resume = ["lm", "--out", str(at / "resumed"), "--resume", "--mesh", "data=2,model=4"]
    commands.append([*resume, "--fully-sharded"])
    assert end(begin(commands, 8))["codes"] == [0] * 6 + [130, 0]
    return at


@pytest.mark.parametrize("study", ["lm", "compare"])
@pytest.mark.parametrize("kind", ["mesh", "sharded"])
def test_eight_devices_give_the_losses_of_one(one, study, kind):
    assert_same(one / study, one / f"{study}-{kind}")
    (session,) = json.loads((one / f"{study}-{kind}" / "run.json").read_text())["sessions"]
    assert session["mesh"] == {"data": 4, "model": 2}
    assert session["fully_sharded"] == (kind == "sharded")


def test_a_run_goes_on_on_another_mesh(one):
    assert_same(one / "lm", one / "resumed")
    sessions = json.loads((one / "resumed" / "run.json").read_text())["sessions"]
    assert [s["mesh"]["data"] for s in sessions] == [1, 2]


def test_two_processes_give_the_losses_of_one_and_stop_at_one_step(one, tmp_path):
    lm = [*LM, *MESH, "--out", str(tmp_path / "lm")]
    compare = [*COMPARE, *MESH, "--out", str(tmp_path / "compare")]
    stopped = [*LM, *MESH, "--fully-sharded", "--out", str(tmp_path / "stopped")]
    done = on_two((lm, lm), (compare, compare), (stopped, [6, *stopped]))
    assert [d["codes"] for d in done] == [[0, 0, 130]] * 2
    for study in ("lm", "compare"):
        assert_same(one / study, tmp_path / study)
    assert [p.name for p in (tmp_path / "stopped/checkpoints/scaled_dot-seed0").iterdir()] == ["10"]
    resume = ["lm", "--out", str(tmp_path / "stopped"), "--resume"]
    assert end(begin([resume], 1))["codes"] == [0]
    assert_same(one / "lm", tmp_path / "stopped")
    sessions = json.loads((tmp_path / "stopped" / "run.json").read_text())["sessions"]
    assert [s["processes"] for s in sessions] == [2, 1]
