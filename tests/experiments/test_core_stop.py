"""Signals: at any moment they end the run with code 130, one line, and the command to go on."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.core import stop

ROOT = Path(__file__).parents[2]
LONG = [
    "scaling",
    "--preset",
    "quick",
    "--depths",
    "4",
    "--train-depths",
    "8",
    "--steps",
    "100000",
    "--pairs",
    "4",
]


def handled(process):
    """Wait until a process handles SIGTERM; /proc tells which signals it catches."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        caught = next(x for x in status.read_text().splitlines() if x.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)


def begin(folder, *arguments):
    command = [sys.executable, "-m", "experiments", *arguments, "--out", str(folder)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.0, 0.7, pytest.param(3.0, marks=pytest.mark.thorough)])
def test_a_signal_in_the_first_seconds_is_heard(tmp_path, number, delay):
    process = begin(tmp_path / "run", *LONG)
    handled(process)
    time.sleep(delay)
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert errors.count("\n") == 1
    assert errors.startswith("stopped")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "sign", "number"),
    [
        (LONG, "run.json", signal.SIGTERM),
        (LONG, "checkpoints", signal.SIGINT),
        (["cost", "--preset", "quick", "--rounds", "100000"], "cells/check.json", signal.SIGTERM),
        (["bench", "--preset", "quick"], "run.json", signal.SIGINT),
    ],
)
def test_a_signal_in_a_run_tells_how_to_go_on(tmp_path, arguments, sign, number):
    folder = tmp_path / "a run"
    process = begin(folder, *arguments)
    while process.poll() is None and not (folder / sign).exists():
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(number)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    command = f"python -m experiments {arguments[0]} --out '{folder}' --resume"
    assert errors == f"stopped; what was finished is kept, go on with: {command}\n"


def test_what_a_garbage_collection_swallows_is_raised_at_the_next_check():
    def callback(phase, info):
        gc.callbacks.remove(callback)  # first: the handler raises as soon as the signal is sent
        os.kill(os.getpid(), signal.SIGTERM)

    swallowed = []
    before, sys.unraisablehook = sys.unraisablehook, swallowed.append
    try:
        with stop.signals():
            gc.callbacks.append(callback)
            gc.collect()
            assert stop.asked()
            with pytest.raises(stop.Stopped):
                stop.check()
    finally:
        sys.unraisablehook = before
    assert len(swallowed) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_held_block_is_finished_unless_a_second_signal_comes(number):
    before = signal.getsignal(number)
    with stop.signals():
        with stop.held():
            os.kill(os.getpid(), number)
            stop.check()
            assert stop.asked()
            with pytest.raises(stop.Stopped):
                os.kill(os.getpid(), number)
        with pytest.raises(stop.Stopped):
            stop.check()
    assert signal.getsignal(number) is before
    with stop.signals():
        assert not stop.asked()
