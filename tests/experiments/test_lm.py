"""The language model: packed documents, its loss, and the study."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attention_jax.nnx import TransformerLM
from experiments.__main__ import main
from experiments.data.packed import Packed
from experiments.data.tokens import BOS, EOS, PAD
from experiments.models import language
from experiments.models.seq2seq import cross_entropy

pytestmark = pytest.mark.usefixtures("as_users_run")

DOCUMENTS = [[5, 6], [7], [8, 9, 10, 11, 12]]


def test_documents_are_packed_and_none_of_their_tokens_is_lost():
    packed = Packed(DOCUMENTS, 7)
    assert (packed.tokens, packed.rows) == (14, 2)
    (batch,) = packed.batches(2)
    b, e, p = BOS, EOS, PAD
    assert batch["tokens"].tolist() == [[b, 5, 6, e, b, 7, e], [b, 8, 9, 10, 11, 12, e]]
    assert batch["targets"].tolist() == [[5, 6, e, p, 7, e, p], [8, 9, 10, 11, 12, e, p]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1, 2, 2, 2], [1] * 7]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2], list(range(7))]


def test_a_document_that_a_row_ends_goes_on_in_the_next():
    (batch,) = Packed([[5, 6, 7, 8, 9, 10]], 4).batches(2)
    assert batch["targets"].tolist() == [[5, 6, 7, 8], [9, 10, EOS, PAD]]
    assert batch["positions"][1].tolist() == [0, 1, 2, 3]


def test_a_batch_is_a_function_of_its_step_and_a_process_makes_its_rows_alone():
    documents = [list(range(5, 5 + n)) for n in (3, 9, 1, 7, 5, 8, 2, 6)]
    packed, other = Packed(documents, 6, seed=1), Packed(documents, 6, seed=1)
    whole = {n: rows[:] for n, rows in packed.batch(11, 4).items()}
    packed.batch(0, 4)["tokens"][:]
    for name, rows in other.batch(11, 4).items():
        np.testing.assert_array_equal(rows[2:4, :], whole[name][2:4])
        np.testing.assert_array_equal(packed.batch(11, 4)[name][:], whole[name])
    made = []
    packed._row = lambda index: made.append(index) or Packed._row(packed, index)
    packed.batch(2, 4)["tokens"][1:2, :]
    assert made == [9]
    assert (Packed(documents, 6, seed=2).batch(11, 4)["tokens"][:] != whole["tokens"]).any()


def test_a_packed_document_has_the_logits_that_it_has_alone():
    model = TransformerLM(1, 2, 8, 16, 13, positions="rotary", rngs=nnx.Rngs(0))
    (batch,) = Packed(DOCUMENTS, 14).batches(1)
    out = language.logits(model, batch, deterministic=True)
    at = 0
    for document in DOCUMENTS:
        ids = np.array([[BOS, *document, EOS]], np.int32)
        alone = model(ids, deterministic=True)
        np.testing.assert_allclose(out[:, at : at + ids.shape[1]], alone, atol=1e-5)
        at += ids.shape[1]


def test_label_smoothing_is_cross_entropy_with_smoothed_labels():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5)) * 3
    labels = jnp.array([[1, 4, PAD], [2, PAD, PAD]])
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 5), 0.1)
    every = optax.softmax_cross_entropy(logits, smooth)
    wanted = jnp.sum(jnp.where(labels != PAD, every, 0)) / 3
    value, count = cross_entropy(logits, labels, 0.1)
    assert count == 3
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


SMALL = [
    "--preset",
    "quick",
    "--steps",
    "8",
    "--batch-size",
    "4",
    "--length",
    "16",
    "--features",
    "16",
    "--heads",
    "2",
]


@pytest.mark.thorough
def test_the_study_trains_samples_and_reports(tmp_path):
    text = tmp_path / "notes.txt"
    words = ["the cat sat", "a dog ran far", "birds sing in spring", "rain falls on the roof"]
    text.write_text("\n".join(f"{words[i % 4]} {'again ' * (i % 5)}{i}" for i in range(200)))
    folder = tmp_path / "run"
    more = ["--data", str(text), "--pieces", "60", "--precision", "bfloat16", "--schedule"]
    more += ["inverse-sqrt", "--label-smoothing", "0.1", "--dropout", "0.1"]
    assert main(["lm", *SMALL, *more, "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    assert list(document["summary"]) == ["scaled_dot", "additive"]
    for model in document["models"]:
        assert model["steps"] == 8
        assert model["perplexity"] == pytest.approx(np.exp(model["test_loss"]))
        assert model["observed"][-1]["valid_loss"] < model["observed"][0]["valid_loss"]
        assert len(model["samples"]) == 4
    lines = (folder / "curves" / "additive-seed0.jsonl").read_text().splitlines()
    assert sum("gradient_norm" in json.loads(line) for line in lines) == 8
    page = (folder / "report.html").read_text()
    for words in ("Perplexity on held-out documents, best first", "Samples", "bfloat16"):
        assert words in page
    # Held-out documents are no training documents.
    assert document["data"]["documents"]["test"] > 0
