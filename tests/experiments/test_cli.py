"""The command line: what it refuses, in one line, and what it makes of presets."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import main, parse
from experiments.studies import STUDIES
from experiments.studies.compare import SCORES, Compare

pytestmark = pytest.mark.usefixtures("as_users_run")

SMALL_LM = ["lm", "--preset", "quick", "--train-size", "60"]
REFUSED = [
    (["compar"], ["study 'compar' is unknown; choose one of compare, scaling, "]),
    (["compar", "--out", "x"], ["study 'compar' is unknown; choose one of compare, scaling, "]),
    (["compare", "--stepps", "3"], ["--stepps", "did you mean --steps?"]),
    (["--sead", "3"], ["option --sead is unknown to compare; did you mean --seeds?"]),
    (["--steps", "ten"], ["--steps 'ten' must be a whole number"]),
    (["cost", "--lengths", "64", "1e3"], ["--lengths '1e3' must be a whole number"]),
    (["--dropout"], ["--dropout needs a value"]),
    (["--test-longer=maybe"], ["--test-longer 'maybe' must be True or False"]),
    (["--preset", "fast"], ["--preset", "'fast'", "quick"]),
    (["scaling", "--preset", "fast"], ["--preset", "default"]),
    (["--seeds", "0"], ["--seeds", "0", "1 or more"]),
    (["cost", "--seeds", "x"], ["--seeds", "x"]),
    (["--scores", "dott"], ["--scores", "'dott'", "scaled_dot"]),
    (["--scores", "dot", "dot"], ["--scores", "once"]),
    (["--score-in", "none"], ["--score-in", "cross, all"]),
    (["--steps", "0"], ["--steps"]),
    (["--features", "30", "--heads", "4"], ["--features", "30", "--heads"]),
    (["--dropout", "1"], ["--dropout", "[0, 1)"]),
    (["--learning-rate", "inf"], ["--learning-rate inf must be a finite"]),
    (["--dropout", "nan"], ["--dropout nan must be a finite"]),
    (["--keep-shortest", "nan"], ["--keep-shortest nan must be a finite"]),
    (["scaling", "--learning-rate=-inf"], ["--learning-rate -inf must be a finite"]),
    (["stability", "--learning-rates", "0.1", "1e39"], ["--learning-rates 1e+39 must be a finite"]),
    (["distill", "--temperature", "Infinity"], ["--temperature inf must be a finite"]),
    (["scaling", "--train-depths"], ["--train-depths is empty"]),
    (["--shapes", "9"], ["--shapes", "1 to 4"]),
    (["cost", "--lengths", "0"], ["--lengths"]),
    (["--data", "grammer"], ["--data grammer: unknown data (did you mean grammar?)"]),
    (["--data", "nowhere/text.tsv"], ["--data nowhere/text.tsv: no such file"]),
    (["--data", "a.en,b.de"], ["--data a.en,b.de: a.en: no such file"]),
    (["--languages", "de"], ["--languages 'de' must be SOURCE-TARGET"]),
    (["--resume"], ["--resume", "--out"]),
    (["--resume", "--out", "nowhere"], ["nowhere", "no run"]),
    (["distill", "--ways", "map"], ["--ways", "'map'", "logits and maps"]),
    (["distill", "--temperature", "0"], ["--temperature", "positive"]),
    (["distill", "--layers", "3"], ["--teacher-layers", "2", "3"]),
    (["distill", "--features", "12"], ["--features", "12", "--heads"]),
    (["lm", "--precision", "float8"], ["--precision", "'float8'", "bfloat16"]),
    (["lm", "--label-smoothing", "1"], ["--label-smoothing", "[0, 1)"]),
    (["lm", "--features", "30"], ["--features", "30", "--heads"]),
    (
        ["lm", "--preset", "quick", "--train-size", "60", "--length", "100000"],
        ["--length 100000", "too few"],
    ),
    (
        ["lm", "--preset", "quick", "--train-size", "60", "--mesh", "rows=2"],
        ["--mesh", "rows=2", "data=4,model=2"],
    ),
    (
        ["lm", "--preset", "quick", "--train-size", "60", "--mesh", "data=4096"],
        ["--mesh", "4096 devices"],
    ),
    (["long", "--names", "full", "lsf"], ["--names", "'lsf'", "lsh"]),
    (["long", "--trained", "window", "window"], ["--trained", "once"]),
    (["long", "--tasks", "max", "sorting"], ["--tasks", "'sorting'", "sort"]),
    (["long", "--lengths", "2"], ["--lengths", "2", "4 or more"]),
    (["long", "--passes", "backward"], ["--passes", "gradient"]),
    (["long", "--reach", "3"], ["--reach", "4 or more"]),
    (["long", "--places", "128"], ["--places", "128", "85"]),
    (["long", "--lengths"], ["--lengths"]),
    (["positions", "--schemes", "rotary", "alib"], ["--schemes", "'alib'", "alibi"]),
    (["positions", "--schemes", "t5", "t5"], ["--schemes", "once"]),
    (["positions", "--tasks", "recall"], ["--tasks", "'recall'", "reverse"]),
    (["positions", "--length", "3"], ["--length", "4 or more"]),
    (["positions", "--ratios", "0"], ["--ratios", "1 or more"]),
    (["positions", "--batch-size", "6"], ["--batch-size", "6", "multiple of 4"]),
    (["prune", "--heads", "1"], ["--heads", "2 or more"]),
    (["prune", "--heads", "4", "--features", "12"], ["--features", "12", "--heads"]),
    (["prune", "--points", "0"], ["--points", "1 or more"]),
    (["stability", "--forms", "QK"], ["--forms", "'QK'", "QK norm"]),
    (["stability", "--learning-rates", "0"], ["--learning-rates", "positive"]),
    (["stability", "--learning-rates", "0.1", "0.1"], ["--learning-rates", "once"]),
    (["stability", "--pairs", "65"], ["--pairs", "65", "64"]),
    (["stability", "--cap", "0"], ["--cap", "positive"]),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=lambda x: " ".join(x)[:40])
def test_a_request_that_cannot_be_met_gets_one_line(
    arguments, words, capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert len(err) < 400
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_real_process_leaves_with_code_2_and_no_traceback():
    command = [sys.executable, "-m", "experiments", "--preset", "fast"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr


def test_help_loads_little():
    slow = {"jax", "matplotlib", "jinja2"}
    code = "import sys, experiments.__main__, experiments.studies; "
    code += f"assert not {slow} & set(sys.modules), {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("study", STUDIES)
def test_help_tells_the_question_and_the_options(study, capsys):
    with pytest.raises(SystemExit) as stop:
        main([study, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "?" in out
    for option in ("--out", "--preset", "--seeds", "--resume"):
        assert option in out


def test_without_a_name_compare_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(Compare, "run", lambda self: asked.append(self))
    assert main(["--preset", "quick"]) == 0
    assert main([]) == 0
    assert [options.preset for options in asked] == ["quick", "default"]


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("preset", ["quick", "default", "full"])
def test_a_preset_fills_every_gap(study, preset):
    options = parse([study, "--preset", preset]).resolved()
    for name in type(options).preset_values[preset]:
        assert getattr(options, name) is not None
    assert options.seeds >= (3 if preset == "full" else 1)


def test_what_is_given_wins_over_the_preset():
    options = parse(["compare", "--preset", "quick", "--steps", "7"]).resolved()
    assert options.steps == 7


def test_the_command_line_knows_every_mechanism():
    from experiments.models.seq2seq import MECHANISMS

    assert SCORES == MECHANISMS


def test_ctrl_c_leaves_with_130(monkeypatch, capsys):
    def stopped(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Compare, "run", stopped)
    assert main([]) == 130
    assert "stopped" in capsys.readouterr().err
