"""How the documentation is built: `python -m sphinx -W -b html docs docs/_build/html`."""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "attention_jax"
author = "the attention_jax authors"
release = version("attention_jax")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "plain_docstrings",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_ext"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "attention_jax"
html_show_sourcelink = False
