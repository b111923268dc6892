"""The page in a browser: pointer, keyboard and text for screen readers."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from attention_jax.visualize import explorer

NEEDED = "ATTENTION_JAX_NEED_BROWSER"  # CI sets it: then a missing browser fails, not skips
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TOKENS = ["</script><b>", "cat", "猫", " ", "cat"]


@pytest.fixture(scope="module")
def browser():
    missing = pytest.fail if os.environ.get(NEEDED) else pytest.skip
    try:
        from playwright import sync_api as api
    except ImportError:
        missing("Playwright is not installed: pip install playwright")
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        missing(f"no Chromium on this machine: none of {', '.join(NAMES)} is on the PATH")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a page; the test fails if the page has errors or requests anything else."""
    problems: list[str] = []

    def visit(page, **context):
        tab = browser.new_context(**context).new_page()
        tab.set_default_timeout(5000)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text))
        file = page if isinstance(page, Path) else page.save(tmp_path / "page.html")
        url = file.as_uri()
        tab.on("request", lambda request: request.url == url or problems.append(request.url))
        tab.goto(url)
        return tab

    yield visit
    assert problems == []


def weights() -> np.ndarray:
    """`[2, 3, 5, 5]`: every query of head n of layer l attends to key n + l and to its own."""
    made = np.zeros((2, 3, 5, 5), np.float32)
    for layer, n, t in np.ndindex(2, 3, 5):
        made[layer, n, t, n + layer] += 0.75
        made[layer, n, t, t] += 0.25
    made[1, 2, 4] = 0
    return made


def description(tab) -> list[str]:
    return tab.inner_text("#says").splitlines()


def focused(tab) -> str:
    return tab.evaluate("document.activeElement.getAttribute('aria-label') "
                        "|| document.activeElement.textContent")  # fmt: skip


def test_pointer_and_keys_describe_the_weights_of_a_token(visit):
    tab = visit(explorer(weights(), TOKENS, title="<b>A page</b>"))
    assert tab.inner_text("h1") == "<b>A page</b>"
    assert tab.locator("b").count() == 0
    queries, keys = (tab.get_by_role("listbox").nth(i).get_by_role("option") for i in (0, 1))
    assert queries.all_inner_texts() == ["</script><b>", "cat", "猫", "␣", "cat"]
    assert description(tab) == ["token cat #4 attends to: </script><b> 0.75, cat #4 0.25"]

    queries.nth(2).hover()
    assert description(tab) == ["token 猫 attends to: </script><b> 0.75, 猫 0.25"]
    keys.nth(3).hover()
    assert description(tab) == ["token space is attended to by: space 0.25"]
    tab.mouse.move(0, 0)
    assert description(tab)[0].startswith("token cat #4 attends to")
    box = tab.locator(".plane").bounding_box()
    tab.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.3 * box["height"])
    assert description(tab)[0].startswith("token cat #1 attends to")
    assert tab.inner_text("figcaption") == "cat #1 → </script><b>: 0.750"

    queries.nth(1).click()
    tab.keyboard.press("ArrowRight")
    assert description(tab) == ["token 猫 attends to: </script><b> 0.75, 猫 0.25"]
    assert [x.get_attribute("aria-selected") for x in queries.all()].index("true") == 2
    tab.keyboard.press("End")
    tab.keyboard.press("ArrowRight")
    assert focused(tab) == "cat"
    tab.keyboard.press("Tab")
    assert description(tab) == [
        "token </script><b> is attended to by: </script><b> 1.00, cat #1 0.75, 猫 0.75, "
        "space 0.75, cat #4 0.75"
    ]


def test_control_characters_are_shown_as_symbols(visit):
    tokens = ["a\x00b", "\x1b[1m", "\x7f", "\x85\n", "\t\r"]
    tab = visit(explorer(weights(), tokens))
    shown = ["a␀b", "␛[1m", "␡", "\ufffd⏎", "⇥⏎"]
    assert tab.get_by_role("listbox").nth(0).get_by_role("option").all_inner_texts() == shown
    assert description(tab) == ["token tab new line attends to: a␀b 0.75, tab new line 0.25"]


def test_layers_and_heads_are_selected_by_keys_and_lists(visit):
    tab = visit(explorer(weights(), TOKENS))
    for name in ("Layer", "Head"):  # order of Tab: layer, head, strip, queries, keys
        tab.keyboard.press("Tab")
        assert tab.get_by_label(name, exact=True).evaluate("x => x === document.activeElement")
    tab.keyboard.press("Tab")
    assert focused(tab) == "layer 0, head 0: entropy 0.45 nats, 81 % of the maximum"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineWidth") != "0px"
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    assert re.match("layer 1, head 1: ", focused(tab))
    assert description(tab) == ["token cat #4 attends to: 猫 0.75, cat #4 0.25"]
    assert tab.get_by_label("Layer", exact=True).input_value() == "1"
    tab.get_by_label("Head", exact=True).select_option("2")
    assert description(tab) == ["token cat #4 attends to: no key"]
    assert tab.locator("[role=gridcell][aria-selected=true]").count() == 1
    assert tab.locator("[role=gridcell][tabindex='0']").count() == 1


def test_two_models_show_the_same_token(visit):
    page = explorer(weights(), TOKENS, compare=weights()[:, ::-1], names=("old", "new"))
    tab = visit(page, color_scheme="dark")
    tab.locator(".tokens [role=option]").nth(3).hover()
    assert description(tab) == [
        "old: token space attends to: </script><b> 0.75, space 0.25",
        "new: token space attends to: 猫 0.75, space 0.25",
        "total variation distance 0.75",
    ]
    difference = tab.get_by_role("region", name="new minus old")
    cell, plane = difference.locator("figcaption"), difference.get_by_role("application")
    colours = """canvas => {
        const row = canvas.getContext("2d").getImageData(0, 3, 5, 1).data;
        return [0, 2, 3].map(s => [...row.slice(4 * s, 4 * s + 3)]);
    }"""
    less, more, same = plane.locator("canvas").evaluate(colours)
    assert less[2] > less[0] + 50  # blue: larger in the old one, on a dark page
    assert more[0] > more[2] + 50  # orange: larger in the new one
    assert same == [0x1B, 0x1E, 0x22]
    assert "old larger −0.5 −0.2" in " ".join(difference.locator(".scale").inner_text().split())
    assert "distance of the rows: 0.75" in difference.locator(".fact").inner_text()
    plane.focus()
    assert cell.inner_text() == "</script><b> → </script><b>: old 1.000, new 0.249, −0.751"
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert cell.inner_text() == "cat #1 → 猫: old 0.000, new 0.750, +0.750"
    assert description(tab)[0].startswith("old: token cat #1 attends to")
    box = plane.bounding_box()
    tab.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.5 * box["height"])
    assert cell.inner_text() == "猫 → cat #4: old 0.000, new 0.000, +0.000"
    tab.get_by_label("Head", exact=True).first.select_option("1")
    assert "distance of the rows: 0.00" in difference.locator(".fact").inner_text()
    assert [x.input_value() for x in tab.get_by_label("Head", exact=True).all()] == ["1", "1"]
    tab.get_by_role("checkbox").uncheck()
    tab.get_by_label("Head", exact=True).last.select_option("0")
    assert [x.input_value() for x in tab.get_by_label("Head", exact=True).all()] == ["1", "0"]


def test_a_large_page_is_drawn_within_a_second_in_a_notebooks_frame_too(visit, maps, tmp_path):
    shown = maps(4, 8, 128, 128)
    page = explorer(shown, [f"token{i}" for i in range(128)])
    assert len(page.html) < 3e6
    measured = "performance.getEntriesByName('attention-drawn')[0].startTime"
    assert any(visit(page).evaluate(measured) < 1000 for _ in range(3))  # 0.2 s on an idle machine
    notebook = tmp_path / "notebook.html"
    notebook.write_text(page._repr_html_())
    tab = visit(notebook)
    frame = tab.frame_locator("iframe")
    frame.locator(".tokens [role=option]").nth(1).click()
    first, second = shown[0, 0, 1, :2]
    assert first > second
    wanted = f"token token1 attends to: token0 {first:.2f}, token1 {second:.2f}"
    assert frame.locator("#says").inner_text() == wanted
    tab.keyboard.press("End")
    tab.wait_for_timeout(150)  # the list has scrolled under a resting pointer
    assert frame.locator("#says").inner_text().startswith("token token127 attends to")
