import html
import json
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.visualize import Explorer, explorer
from attention_jax.visualize.packing import pack, unpack


def data(page: Explorer) -> dict:
    """The data of the page's script."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html)
    assert match is not None
    return json.loads(match[1])


def layers(page: Explorer, model: int = 0) -> list[dict]:
    return data(page)["models"][model]["layers"]


def weights_of(layer: dict) -> np.ndarray:
    return unpack(layer["levels"], layer["greatest"], tuple(layer["shape"]))


def test_packed_weights_have_an_error_below_one_level(maps):
    weights = maps(3, 17, 13)
    weights[1, 4] = 0
    unpacked = unpack(*pack(weights), weights.shape)
    assert (np.abs(unpacked - weights) <= weights.max(-1, keepdims=True) / 255).all()
    assert (unpacked[weights == 0] == 0).all()
    uniform = np.full((1, 1, 512), 1 / 512, np.float32)
    np.testing.assert_allclose(unpack(*pack(uniform), uniform.shape), uniform, rtol=1e-6)


def test_a_page_is_self_contained_and_small(maps, tmp_path):
    weights = maps(4, 8, 128, 128)
    tokens = [f"token{i}" for i in range(128)]
    page = explorer(weights, tokens, title="Four layers")
    assert len(page.html) < 1e6
    assert page.save(tmp_path / "page.html").read_text() == page.html
    assert page.html.startswith("<!DOCTYPE html>")
    assert "{{" not in page.html
    assert not re.search(r"https?:|src=|url\(|@import|fetch|XMLHttpRequest", page.html)
    found = layers(page)
    assert [layer["name"] for layer in found] == [f"layer {i}" for i in range(4)]
    np.testing.assert_allclose(weights_of(found[2]), weights[2], atol=1 / 255)
    positive = np.where(weights > 0, weights, 1)
    nats = -(positive * np.log(positive)).sum(-1).mean(-1)
    np.testing.assert_allclose([layer["entropy"] for layer in found], nats, atol=1e-3)


def test_tokens_are_escaped(maps):
    tokens = ["</script><b>", "<!--", "{{data}}", "&amp;", "猫", "🙂", "\ud800", "\u2028", '"', ""]
    page = explorer(maps(1, 2, 10, 10), tokens, title="<i>{{script}}</i> 猫")
    assert data(page)["texts"] == [tokens]
    assert page.html.count("</script>") == 2
    assert "<b>" not in page.html
    assert "<title>&lt;i&gt;{{script}}&lt;/i&gt; &#29483;</title>" in page.html
    assert page.html.isascii()


def test_control_characters_of_names_are_shown_as_symbols(maps):
    one = maps(1, 2, 2)
    page = explorer({"a\x00b": one}, compare={"\x1b": one}, names=("\x07", "b"), title="t\x00\x85")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", page.html + page._repr_html_())
    assert [model["name"] for model in data(page)["models"]] == ["␇", "b"]
    assert [layers(page, i)[0]["name"] for i in (0, 1)] == ["a␀b", "␛"]
    assert "<title>t&#9216;&#65533;</title>" in page.html


def test_a_notebook_shows_the_page_in_an_iframe(maps):
    page = explorer(maps(1, 2, 3, 3), height=500, title='"')
    frame = page._repr_html_()
    match = re.fullmatch(
        r'<iframe title="&quot;" sandbox="allow-scripts" style="width: 100%; height: 500px; '
        r'border: 0" srcdoc="([^"<>]*)"></iframe>',
        frame,
    )
    assert match is not None
    assert html.unescape(match[1]) == page.html
    assert repr(page).startswith("Explorer('\"', 0.0")


def test_forms_of_weights(maps):
    one, stacked = maps(2, 5, 5), maps(3, 2, 5, 5)
    assert [x["name"] for x in layers(explorer(one))] == ["layer 0"]
    assert len(layers(explorer(list(stacked)))) == 3
    read = {"encoder": SimpleNamespace(weights=one[None]), "decoder": jnp.asarray(one)}
    assert [x["name"] for x in layers(explorer(read))] == ["encoder", "decoder"]
    batch = np.stack([stacked, stacked[::-1]], 1)  # [L, B, N, T, S]
    found = layers(explorer(batch, example=1))
    np.testing.assert_allclose(weights_of(found[0]), stacked[2], atol=1 / 255)
    found = layers(explorer([batch[0]], example=np.int64(-1)))
    np.testing.assert_allclose(weights_of(found[0]), stacked[2], atol=1 / 255)
    found = layers(explorer(jnp.asarray(one, jnp.bfloat16)))
    np.testing.assert_allclose(weights_of(found[0]), one, atol=1 / 100)


def test_layers_with_different_tokens(maps):
    weights = {"encoder/0": maps(2, 4, 4), "decoder/self": maps(2, 3, 3), "cross": maps(2, 3, 4)}
    source, target = ["a", "b", "c", "d"], np.array(["x", "y", "z"])
    page = explorer(weights, {"encoder/*": source, "*": target}, {"cross": source})
    texts = data(page)["texts"]
    labels = [(texts[x["queries"]], texts[x["keys"]]) for x in layers(page)]
    x, y = source, target.tolist()
    assert labels == [(x, x), (y, y), (y, x)]
    assert len(texts) == 2
    with pytest.raises(ValueError, match="'cross' has T = 3 queries and S = 4 keys: give key_tok"):
        explorer(weights, {"encoder/*": source, "*": target})


def test_two_models(maps):
    page = explorer(maps(2, 3, 4, 4), compare=maps(1, 5, 4, 4), names=("big", "small"))
    assert [model["name"] for model in data(page)["models"]] == ["big", "small"]
    assert layers(page, 1)[0]["shape"] == [5, 4, 4]


def test_empty_rows_have_no_entropy():
    weights = np.zeros((1, 3, 3), np.float32)
    assert layers(explorer(weights))[0]["entropy"] == [None]
    weights[0, 1] = [0.5, 0.5, 0]
    (layer,) = layers(explorer(weights))
    np.testing.assert_allclose(layer["entropy"], np.log(2), atol=1e-4)
    assert layer["share"] == [1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weights": np.ones((4, 4), np.float32)}, ValueError, r"\[\*B, N, T, S\], got \[4, 4\]"),
        ({"weights": np.ones((1, 2, 2), int)}, TypeError, "weights must be floating, got .*int"),
        ({"weights": np.zeros((1, 0, 2))}, ValueError, r"T = 0 in \[1, 0, 2\]"),
        ({"weights": []}, ValueError, "weights has no layer"),
        ({"weights": np.zeros((1, 513, 2))}, ValueError, "takes 512 tokens"),
        ({"weights": np.full((1, 2, 2), np.nan)}, ValueError, "finite, and is not at n = 0, t = 0"),
        ({"weights": np.full((1, 2, 2), 3.0)}, ValueError, "must lie in .0, 1.*not logits"),
        ({"weights": [np.zeros((2, 1, 2, 2))]}, ValueError, r"\*B = \[2\]: choose one.*example=0"),
        (
            {"weights": [np.zeros((2, 1, 2, 2))], "example": 2},
            ValueError,
            "not an index into the batch",
        ),
        ({"weights": {"a": SimpleNamespace(weights=None)}}, ValueError, "weights=True"),
        ({"tokens": "ab"}, TypeError, "tokens must be a list of strings, got str"),
        ({"tokens": ["a"]}, ValueError, "tokens has 1 tokens but T = 2"),
        ({"tokens": ["a", "b"], "key_tokens": ["c"]}, ValueError, "key_tokens has 1 .* S = 2"),
        ({"tokens": np.array([1, 2])}, TypeError, "tokens must be strings, got int"),
        ({"compare": np.zeros((1, 3, 3)), "tokens": ["a", "b"]}, ValueError, "T = 3"),
        ({"names": ("one", "two")}, ValueError, "give the second as compare"),
        ({"compare": np.zeros((1, 2, 2)), "names": ("one",)}, ValueError, "two strings"),
    ],
)
def test_wrong_arguments_raise(arguments, error, words):
    with pytest.raises(error, match=words):
        explorer(**({"weights": np.zeros((1, 2, 2))} | arguments))
