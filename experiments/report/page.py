"""``report.html``: a self-contained file with inlined figures."""

import base64
from pathlib import Path
from typing import Any

import jinja2

from attention_jax.visualize.symbols import printable
from experiments.files import write_whole
from experiments.report.blocks import Heatmap, Report, Table, duration

_TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path, report: Report, results: dict[str, Any]) -> Path:
    """Write ``report.html`` into ``folder`` and return its path.

    Args:
        folder: the run folder, which the pictures' file names are relative to.
        report: the report.
        results: the document of results.json, whose head has settings, versions, device and times.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    # Text of the data may hold control characters, which HTML forbids.
    environment.finalize = lambda x: printable(x) if isinstance(x, str) else x
    environment.filters["inlined"] = lambda name: _inlined(folder / name)
    environment.filters["anchor"] = _anchor
    environment.tests["table"] = lambda block: isinstance(block, Table)
    environment.tests["heatmap"] = lambda block: isinstance(block, Heatmap)
    html = environment.get_template("report.html.j2").render(
        report=report, results=results, facts=_facts(results)
    )
    file = folder / "report.html"
    write_whole(file, html)
    return file


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of "What was run": name, value."""
    device = results["environment"]["device"]
    versions = results["environment"]["versions"]
    sessions = results["sessions"]
    settings = results["settings"]
    return [
        ("Study", results["study"]),
        ("Started", results["started"].replace("T", " ")),
        (
            "Took",
            duration(results["seconds"]) + (f" in {sessions} sessions" if sessions > 1 else ""),
        ),
        ("Settings", ", ".join(f"{k} {_setting(v)}" for k, v in settings.items())),
        ("Device", f"{device['count']} × {device['kind']} ({device['platform']})"),
        ("Processor", f"{device['cpu']}, {device['cores']} cores"),
        ("System", results["environment"]["system"]),
        ("Versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v)),
    ]


def _setting(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(str(v) for v in value)
    return "–" if value is None else str(value)


def _inlined(file: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")
