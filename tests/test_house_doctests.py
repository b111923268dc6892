"""Every example in a docstring runs, and shows what it says it shows.

The docstrings are read from the source and not from the imported objects: functions that were
wrapped (by jit, by a type checker) hide from doctest's own finder.
"""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "attention_jax").rglob("*.py")) + sorted(
    (ROOT / "experiments").rglob("*.py")
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(path: Path) -> list[doctest.DocTest]:
    """One test for each docstring of the file that has an example."""
    parser, found = doctest.DocTestParser(), []
    for node in ast.walk(ast.parse(path.read_text())):
        texts = []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts = [ast.get_docstring(node)]
        elif isinstance(node, ast.Call):  # a docstring that is completed, as an argument
            arguments = (x.value for x in node.args if isinstance(x, ast.Constant))
            texts = [inspect.cleandoc(x) for x in arguments if isinstance(x, str)]
        for text in texts:
            if text and ">>>" in text:
                name = getattr(node, "name", "module")
                line = getattr(node, "lineno", 1)
                found.append(parser.get_doctest(text, {}, name, str(path), line))
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


THOROUGH = {"diagnostics", "distillation", "linen", "nnx", "sharding", "subquadratic"}


def slow_ones_marked(paths: list[Path]) -> list:
    thorough = [pytest.mark.thorough]
    return [
        pytest.param(p, marks=thorough if p.parts[len(ROOT.parts) + 1] in THOROUGH else [])
        for p in paths
    ]


@pytest.mark.parametrize(
    "path",
    slow_ones_marked([p for p in FILES if examples(p)]),
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_the_examples_of_a_file(path):
    module = importlib.import_module(module_name(path))
    for test in examples(path):
        test.globs = {"jax": jax, "jnp": jnp, "np": np, **vars(module)}
        report: list[str] = []
        outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
        assert outcome.failed == 0, "".join(report)
