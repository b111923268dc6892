"""What is in the repository and in the wheel, and what the README promises a fresh machine."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".cfg",
    ".txt",
    ".css",
    ".js",
    ".j2",
    ".html",
    ".tsv",
    "",
}
MAKES_ENVIRONMENT = "python3 -m venv .venv && .venv/bin/pip install -q -e "


def repository_files() -> list[Path]:
    """The files git tracks, or, in an unpacked archive, those in the project's own folders."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        folders = ("attention_jax", "experiments", "tests", "docs", ".ci")
        paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
        paths += list(ROOT.glob("*"))
    return [p for p in paths if p.is_file() and "__pycache__" not in p.parts]


def text_files() -> list[Path]:
    return [p for p in repository_files() if p.suffix in TEXT]


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_the_readme_has_two_commands_and_ci_runs_the_second():
    main_job, tests = readme_commands()
    for command in (main_job, tests):
        assert command.startswith(MAKES_ENVIRONMENT)
    assert main_job.endswith("&& .venv/bin/python -m experiments")
    ci = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -E '(.+)' README\.md", ci)
    assert pattern is not None
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if re.search(pattern[1], line)] == [tests]


def test_ci_is_executable_and_stops_at_the_first_failure():
    ci = ROOT / ".ci" / "run"
    assert ci.stat().st_mode & 0o111 == 0o111
    assert "\nset -euo pipefail\n" in ci.read_text()


def test_ci_installs_a_browser_and_fails_without_one():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    browser = (ROOT / "tests" / "visualize" / "test_browser.py").read_text()
    variable = re.search('NEEDED = "(.+?)"', browser)[1]
    names = re.search(r"NAMES = (\(.+?\))", browser)[1]
    assert f"    for name in {' '.join(ast.literal_eval(names))}; do" in lines
    steps = [lines.index(f"export {variable}=1")]
    steps += [lines.index(f'step "{name}') for name in ('browser" browser', 'tests" readme_tests')]
    assert steps == sorted(steps)


def test_the_wheel_holds_the_library_alone(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"attention_jax"}
    assert "attention_jax/py.typed" in names
    packed = {name for name in names if name.startswith("attention_jax/")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "attention_jax").rglob("*")
        if path.suffix in {".py", ".css", ".js", ".html"}  # the last three make visualize's page
    }
    assert packed == sources | {"attention_jax/py.typed"}


def test_every_core_dependency_has_a_lower_bound_and_is_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    names = []
    for requirement in project["dependencies"]:
        match = re.fullmatch(r"([a-z]+)>=[0-9.]+", requirement)
        assert match is not None, f"{requirement} has no lower bound"
        names.append(match[1])
    assert names == ["jax", "flax", "optax", "chex", "einops", "jaxtyping"]


def test_files_are_short_and_name_no_machine():
    # Written in pieces, so that this file is not an instance of what it forbids.
    forbidden = [
        "py" + r"pi\.",
        "python" + "hosted",
        "index" + "-url",
        "find" + "-links",
        "registry" + r"\.",
        r"(?<![\w.])/" + r"(work|opt|root|home|mnt)/",
    ]
    wrong = []
    for path in text_files():
        text = path.read_text()
        if (lines := text.count("\n")) > 400:
            wrong.append(f"{path}: {lines} lines, where a file has at most 400")
        found = [match[0] for pattern in forbidden if (match := re.search(pattern, text))]
        wrong += [f"{path}: {text}" for text in found]
    assert not wrong, "\n".join(wrong)
