"""The README and the docs: every code block runs, and every public name has its page."""

import contextlib
import importlib
import io
import re
from pathlib import Path

import jax
import pytest

from tests.test_house_surface import SURFACE

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(path: Path) -> list[tuple[str, str, int]]:
    """The fenced blocks of a page: language, text, and the line the text starts on."""
    page = path.read_text()
    return [(m[1], m[2], page.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(page)]


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# Pages whose code takes long; folders and files of docs/.
THOROUGH = (
    "docs/api/dist", "docs/api/shard", "docs/choosing", "docs/examples", "docs/patterns",
    "docs/positions", "docs/subquad", "docs/visualize",
)  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[pytest.mark.thorough] if page_name(p).startswith(THOROUGH) else [])
        for p in PAGES
        if any(b[0] == "python" for b in blocks(p))
    ],
    ids=page_name,
)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run(path)  # as a reader would: Optax, for one, promotes


def run(path: Path) -> None:
    """Runs a page's blocks in one namespace; a `text` block shows what the last one printed."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    printed = None
    for language, text, line in blocks(path):
        if language == "python":
            code = compile("\n" * (line - 1) + text, str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, namespace)
            printed = out.getvalue()
        elif language == "text" and printed is not None:
            shown = [row.rstrip() for row in text.strip().splitlines()]
            assert [row.rstrip() for row in printed.strip().splitlines()] == shown, (
                f"line {line}: the page shows something else"
            )
            printed = None
    jax.block_until_ready([v for v in namespace.values() if isinstance(v, jax.Array)])


def test_pages_have_no_kind_of_block_that_is_not_checked():
    checked = {"python", "text", "bash", "{toctree}", "{eval-rst}"}
    found = {page_name(path): {language for language, _, _ in blocks(path)} for path in PAGES}
    assert {page: kinds - checked for page, kinds in found.items() if kinds - checked} == {}


def test_the_links_between_files_lead_somewhere():
    missing = [
        f"{page_name(path)}: {target}"
        for path in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
        if "://" not in target and not (path.parent / target).exists()
    ]
    assert not missing


def objects(names: set[str]) -> dict[int, str]:
    """The objects that full names stand for, by identity: some have two names."""
    found = {}
    for name in names:
        module, _, attribute = name.rpartition(".")
        found[id(getattr(importlib.import_module(module), attribute))] = name
    return found


def documented() -> set[str]:
    """Full names of the objects that the pages under docs/api describe."""
    names, module = set(), ""
    for page in sorted((DOCS / "api").glob("*.md")):
        for line in page.read_text().splitlines():
            if match := re.match(r"\.\. currentmodule:: (\S+)", line):
                module = match[1]
            elif match := re.match(r"\.\. auto(?:function|class|data):: (\S+)", line):
                names.add(f"{module}.{match[1]}")
    return names


def test_every_public_name_has_its_page():
    public = objects({f"{module}.{name}" for module, names in SURFACE.items() for name in names})
    written = objects(documented())
    assert sorted(name for key, name in public.items() if key not in written) == []
    assert sorted(name for key, name in written.items() if key not in public) == []


def test_every_public_module_has_its_page():
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    for module in SURFACE:
        assert f"\n`{module}`" in pages, f"{module} has no page"
        assert importlib.import_module(module).__doc__, f"{module} has no docstring"
