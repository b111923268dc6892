import ast
import io
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams

from attention_jax import masks, visualize

TOKENS = ["the", "$c_{$", " ", "\n"]
SHOWN = ["the", "$c_{$", "␣", "⏎"]


NOT_PRINTABLE = ["a\x00b", "\x1b", "\x7f", "\x85", "\ud800", "\uffff", "\u2028", "$ $"]


def texts(labels) -> list[str]:
    return [label.get_text() for label in labels]


def settings() -> dict:
    """The global settings of matplotlib, except for the backend, which saving a figure may set."""
    return {name: rcParams[name] for name in rcParams if name != "backend"}


def draw(figure) -> None:
    """Draws the figure, which is when matplotlib parses text."""
    figure.savefig(io.BytesIO(), dpi=40)


def test_head_map_has_tokens_and_numbers():
    weights = np.tri(4, dtype=np.float32) / np.arange(1, 5, dtype=np.float32)[:, None]
    before = settings()
    figure = visualize.head_map(weights, TOKENS, title="layer $_$, head 2")
    draw(figure)
    axes = figure.axes[0]
    assert texts(axes.get_xticklabels()) == texts(axes.get_yticklabels()) == SHOWN
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys", "queries")
    assert axes.get_title(loc="left") == "layer $_$, head 2"
    assert texts(axes.texts)[:6] == ["1.00", "0.00", "0.00", "0.00", "0.50", "0.50"]
    np.testing.assert_array_equal(axes.images[0].get_array(), weights)
    assert settings() == before


@pytest.mark.parametrize("form", ["png", "svg"])
def test_control_characters_are_drawn_as_symbols(form):
    square = np.full((8, 8), 1 / 8, np.float32)
    name = "".join(NOT_PRINTABLE)
    for figure in (
        visualize.head_map(square, NOT_PRINTABLE, title=name),
        visualize.heads_grid({name: square[None]}, NOT_PRINTABLE),
        visualize.entropy_grid({name: np.ones(2)}),
        visualize.alignment({name: square}, NOT_PRINTABLE, NOT_PRINTABLE),
    ):
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=40, format=form)
        if form == "svg":
            ElementTree.fromstring(drawn.getvalue())
        for axes in figure.axes:
            shown = [*texts(axes.get_xticklabels()), axes.get_title(loc="left"), axes.get_ylabel()]
            assert "".join(shown).isprintable()
    shown = texts(visualize.head_map(square, NOT_PRINTABLE).axes[0].get_xticklabels())
    assert shown[0] in ("a␀b", "a\ufffdb")  # with and without a font that has the symbol
    assert shown[3:] == ["\ufffd", "\ufffd", "\ufffd", "⏎", "$ $"]


def test_heads_grid_has_a_map_for_every_head(maps):
    weights = maps(2, 3, 4, 4)
    figure = visualize.heads_grid({"first": weights[0], "second": weights[1]}, TOKENS)
    draw(figure)
    *heads, bar = figure.axes
    for n, axes in enumerate(heads):
        np.testing.assert_array_equal(axes.images[0].get_array(), weights[n // 3, n % 3])
    assert texts(axes.title for axes in heads) == ["head 0", "head 1", "head 2", "", "", ""]
    assert [axes.get_ylabel() for axes in heads] == ["first", "", "", "second", "", ""]
    assert texts(heads[0].get_yticklabels()) == texts(heads[5].get_xticklabels()) == SHOWN
    assert bar.get_ylabel() == "weight"
    single = visualize.heads_grid(weights[0])
    assert texts(axes.title for axes in single.axes[:-1]) == ["head 0", "head 1", "head 2"]


def test_entropy_grid_takes_weights_or_entropies(maps):
    weights = [np.full((2, 3, 4), 0.25), np.eye(4)[None]]
    figure = visualize.entropy_grid(weights)
    draw(figure)
    axes = figure.axes[0]
    assert texts(axes.texts) == ["1.39", "1.39", "0.00"]
    assert texts(axes.get_yticklabels()) == ["layer 0", "layer 1"]
    assert axes.get_xlabel() == "head"
    assert axes.images[0].get_clim() == (0, np.log(4))
    table = np.array([[0.5, 2.0]])
    assert texts(visualize.entropy_grid(table).axes[0].texts) == ["0.50", "2.00"]
    named = visualize.entropy_grid({"encoder": table[0]}).axes[0]
    assert texts(named.get_yticklabels()) == ["encoder"]


def test_block_map_is_drawn_in_units_of_tokens():
    blocks = masks.causal().block_map(100, 130, 32)
    figure = visualize.block_map(blocks)
    draw(figure)
    (axes,) = figure.axes
    assert texts(figure.legends[0].get_texts()) == ["10 skipped", "4 partial", "6 full"]
    assert axes.get_title(loc="left") == "10 of 20 blocks visited (50.0%)"
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 130), (100, 0))
    (mesh,) = axes.collections
    assert mesh.get_coordinates()[-1, -1].tolist() == [130, 100]
    kinds = np.stack([blocks.kinds, blocks.kinds * 0])
    figure = visualize.block_map(kinds, example=1)
    assert figure.axes[0].get_xlabel() == "keys, in blocks"
    assert texts(figure.legends[0].get_texts())[0] == "20 skipped"


def test_alignment_frames_gold_links():
    panels = {"dot": np.eye(2, 3), "additive": np.full((2, 3), 1 / 3)}
    gold = np.argwhere(np.array([[True, False, False], [False, False, True]]))
    figure = visualize.alignment(panels, ["la", "mer", "."], ["the", "sea"], gold=gold)
    draw(figure)
    for axes, title in zip(figure.axes[:2], panels, strict=True):
        assert axes.get_title(loc="left") == title
        assert texts(axes.get_xticklabels()) == ["la", "mer", "."]
        assert texts(axes.get_yticklabels()) == ["the", "sea"]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("source", "target")
        frames = [(line.get_xdata().mean(), line.get_ydata().mean()) for line in axes.lines]
        assert len(frames) == 2
        assert axes.lines[1].get_xdata()[:2] == pytest.approx([1.5, 2.5])
        assert axes.lines[1].get_ydata()[1:3] == pytest.approx([0.5, 1.5])
    assert texts(figure.legends[0].get_texts()) == ["gold"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: visualize.head_map(np.zeros((1, 2, 2))), r"must be \[T, S\], got \[1, 2, 2\]"),
        (lambda: visualize.head_map(np.eye(2), ["a"]), "tokens has 1 tokens but T = 2"),
        (lambda: visualize.head_map(np.eye(2, 3), ["a", "b"]), "give key_tokens too"),
        (lambda: visualize.heads_grid(np.zeros((1, 2, 2)), ["a"]), "tokens has 1"),
        (lambda: visualize.entropy_grid(np.array([[-1.0]])), "must be entropies"),
        (lambda: visualize.entropy_grid(np.array([[1.0]]), example=0), "no batch axes"),
        (lambda: visualize.block_map(np.full((2, 2), 3)), "0, 1 or 2, got 3 to 3"),
        (lambda: visualize.block_map(np.zeros((2, 2, 2), int)), r"axes \[2\] in front"),
        (lambda: visualize.block_map(np.zeros((0, 2), int)), r"with a block, got \[0, 2\]"),
        (lambda: visualize.alignment(np.eye(2), ["a", "b"], ["c"]), "target has 1 .* T = 2"),
        (
            lambda: visualize.alignment(np.eye(2), ["a", "b"], ["c", "d"], [(0, 2)]),
            r"\(0, 2\) must be \(target, source\) within T = 2, S = 2",
        ),
    ],
)
def test_wrong_arguments_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_figures_without_matplotlib_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'attention_jax\[visualize\]'"):
        visualize.head_map(np.eye(2))
    assert visualize.explorer(np.full((1, 2, 2), 0.5)).title == "Attention"
    for file in Path(visualize.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:  # statements that run on import
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "matplotlib" not in ast.unparse(node)
