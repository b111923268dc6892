"""How the documentation is built: `python -m sphinx -W -b html docs docs/_build/html`."""

import ast
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "attention_jax"
author = "the attention_jax authors"
release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "plain_docstrings",
    "short_signatures",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_ext"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "substitution"]


def _studies() -> str:
    """Return the table of the studies: the first line of each one's docstring is its question."""
    rows = ["| study | question |", "|---|---|"]
    for file in sorted((HERE.parent / "experiments" / "studies").glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            bases = node.bases if isinstance(node, ast.ClassDef) else []
            if any(ast.unparse(base).endswith("Options") for base in bases):
                question = (ast.get_docstring(node) or "").partition("\n")[0]
                rows.append(f"| `{file.stem}` | {question} |")
    return "\n".join(rows)


myst_substitutions = {"studies": _studies()}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "attention_jax"
html_show_sourcelink = False
