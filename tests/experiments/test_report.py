"""The report's words and tables, and the figures."""

import copy
import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import font_manager

from experiments.report import figures, look
from experiments.report.blocks import (
    Heatmap,
    Report,
    Row,
    Section,
    Table,
    duration,
    joined,
    mean_sd,
    memory,
)
from experiments.report.page import write_report
from experiments.studies.compare_report import costs_in_words

RESULTS = {
    "study": "compare",
    "status": "finished",
    "quick": False,
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 61.0,
    "sessions": 2,
    "settings": {"seeds": 3, "scores": ["dot", "none"]},
    "environment": {
        "versions": {"python": "3.11"},
        "device": {"platform": "cpu", "kind": "cpu", "count": 1, "cpu": "some", "cores": 2},
        "system": "Linux",
    },
}


def test_mean_and_spread():
    assert mean_sd([1.0, 2.0, 3.0]) == "2.0 ± 1.0"
    assert mean_sd([2.0]) == "2.0"
    assert mean_sd([None]) == "–"
    assert mean_sd([]) == "–"
    assert mean_sd([1.0, None, 3.0]) == "2.0 ± 1.4 (2 of 3)"
    assert mean_sd([float("nan"), 2.0], 2) == "2.00 (1 of 2)"
    assert mean_sd([0.25, 0.75], 0, percent=True) == "50 ± 35 %"


def test_numbers_in_words():
    assert [duration(s) for s in (0.4, 59.6, 250, 7500)] == [
        "0 s", "1 min 0 s", "4 min 10 s", "2 h 5 min",
    ]  # fmt: skip
    assert [memory(s) for s in (None, 10, 532 * 1024, 41 * 2**20, 2 * 2**30)] == [
        "–", "10 B", "532 KiB", "41 MiB", "2.0 GiB",
    ]  # fmt: skip
    assert [joined(w) for w in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip


def page_of(tmp_path, question="Q?", **fields):
    whole = {"title": "T", "answer": ["A."], "sections": []} | fields
    return write_report(tmp_path, Report(**whole), RESULTS | {"question": question}).read_text()


def test_text_from_outside_is_escaped(tmp_path):
    table = Table("<b>", ["<i>"], [Row(["<script>alert(1)</script>"])])
    page = page_of(tmp_path, sections=[Section("S & S", ["<p>"], [table])])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_rows_from_papers_look_different(tmp_path):
    table = Table("C", ["a", "b"], [Row(["ours", "1"]), Row(["theirs", "2"], published=True)])
    page = page_of(tmp_path, sections=[Section("S", [], [table])])
    assert page.count('<tr class="published">') == 1


def test_what_was_run_is_told(tmp_path):
    page = page_of(tmp_path)
    for words in ("1 min 1 s in 2 sessions", "seeds 3", "scores dot/none", "some, 2 cores"):
        assert words in page


def test_words_without_a_font_are_drawn_in_html(tmp_path):
    maps = Heatmap("caption", [("dot", np.array([[0.25, 0.75]]))], ["日", "月"], ["day"], [(0, 0)])
    page = page_of(tmp_path, sections=[Section("S", [], [maps])])
    assert '<th scope="col">日</th>' in page
    assert page.count('class="gold"') == 1
    assert "--w: 0.75" in page


def test_fonts_are_asked_for_their_signs():
    assert look.drawable(["Ärzte", "⟨end⟩", "√d"])
    assert not look.drawable(["\U000f0000"])


@pytest.mark.parametrize("weight", [200, 700])
@pytest.mark.parametrize("at", [0, None])
def test_the_regular_face_of_a_family_is_asked_wherever_the_others_stand(monkeypatch, weight, at):
    here = [f for f in font_manager.fontManager.ttflist if f.name == "DejaVu Sans"]
    regular = next(f for f in here if (f.style, f.weight, f.stretch) == ("normal", 400, "normal"))
    other = next(f for f in font_manager.fontManager.ttflist if f.name == "cmb10")  # few signs
    face = dataclasses.replace(other, name="DejaVu Sans", weight=weight, style="normal")
    listed = [regular]
    listed.insert(len(listed) if at is None else at, face)
    manager = copy.copy(font_manager.fontManager)
    manager.ttflist = listed
    monkeypatch.setattr(font_manager, "fontManager", manager)
    look._fonts.cache_clear()
    try:
        assert list(look._fonts()) == ["DejaVu Sans"]
        assert look.drawable(["⟨end⟩", "Ä"])
    finally:
        look._fonts.cache_clear()


HOSTILE = [
    "$x_{$",
    "cost $5 or $6",
    "\\frac{",
    "a\x00b",
    "\x1b[31m",
    "\x85",
    "\ud800",
    "<&>",
    "\uffff",
]


def test_no_word_of_the_data_is_read_as_a_formula_or_lost(tmp_path):
    weights = np.full((len(HOSTILE), len(HOSTILE)), 0.5)
    for name in ("a.png", "a.svg"):
        look.alignments(tmp_path / name, [("$m$ $", weights)], HOSTILE, HOSTILE, [(0, 1)])
    text = (tmp_path / "a.svg").read_text()
    ElementTree.fromstring(text)  # control characters are no XML
    for shown in ("$x_{$", "cost $5 or $6", "a␀b", "␛[31m"):
        assert f"<!-- {shown} -->" in text
    series = {w: [[(1, 1.0), (2, 2.0)]] for w in HOSTILE}
    figures.curves(tmp_path / "c.svg", [("$t$ $", series)], x="$x$ $", y="$y$ $")
    bars = {w: [[1.0]] * len(HOSTILE) for w in HOSTILE}
    figures.bars(tmp_path / "b.svg", HOSTILE, bars, x="", y="")
    figures.ratios(tmp_path / "r.svg", {word: {"$f$ $": (0.5, 1.0)} for word in HOSTILE})
    for name in ("c.svg", "b.svg", "r.svg"):
        text = (tmp_path / name).read_text()
        ElementTree.fromstring(text)
        assert "<!-- cost $5 or $6 -->" in text, name
        assert "<!-- a␀b -->" in text, name


def test_the_report_shows_control_characters_as_symbols(tmp_path):
    word = "a\x00b\x1b\x7f\x85\ud800"
    table = Table(word, [word], [Row([word])], note=word)
    maps = Heatmap(word, [(word, np.ones((1, 1)))], [word], [word])
    section = Section(word, [word], [table, maps])
    page = page_of(tmp_path, title=word, question=word, answer=[word], sections=[section])
    assert page.count("a␀b␛␡\ufffd\ufffd") >= 12
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page)


def test_bars_have_one_precision_and_fill_the_axis(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda figure, file: drawn.append(figure.axes))
    series = {"none": [[2.0, 4.0], [1.26]], "dot": [[10.6], [None]]}
    figures.bars(tmp_path / "b.png", ["1", "2"], series, x="", y="")
    figures.bars(tmp_path / "b.png", ["1", "2"], {"none": series["none"]}, x="", y="")
    words = [[text.get_text() for text in axes[0].texts] for axes in drawn]
    assert words == [["3", "1", "11", "–"], ["3.0", "1.3"]]
    assert [axes[0].get_ylim() for axes in drawn] == [
        pytest.approx((0, 1.12 * 10.6)), pytest.approx((0, 1.12 * (3 + 2**0.5))),
    ]  # fmt: skip


def test_step_times_within_the_noise_are_not_told_as_ratios():
    def said(**times):
        summary = {score: {"step_milliseconds": each} for score, each in times.items()}
        seeds = len(times["scaled_dot"])
        return costs_in_words({"summary": summary, "settings": {"seeds": seeds}})

    one = said(dot=[9.4], scaled_dot=[10.0], additive=[15.0])
    assert "as a multiple of that: additive 1.50; within 10% of it" in one
    assert one.endswith("which one seed cannot tell from noise: unscaled dot.")
    many = said(dot=[9.0, 11.0], scaled_dot=[10.0, 10.0], additive=[10.4, 10.5])
    assert "multiple of that: additive 1.04; within twice the spread over seeds" in many
    assert many.endswith(": unscaled dot.")
    assert said(scaled_dot=[10.0]) is None


@pytest.mark.parametrize("value", [float("nan"), None])
def test_a_figure_leaves_out_what_is_not_a_number(tmp_path, value):
    series = {"dot": [[(1, 1.0), (2, value)], [(1, 2.0), (2, value)]], "none": [[(1, value)]]}
    figures.curves(tmp_path / "c.png", [("t", series)], x="x", y="y", log_x=True)
    figures.bars(
        tmp_path / "b.png", ["1–5"], {"dot": [[value]], "none": [[1.0, value]]}, x="", y=""
    )
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("c.png", "b.png"))
