"""The study of distillation: what a student is shown, and the report."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from attention_jax.diagnostics import AttentionInputs
from experiments import distilling
from experiments.__main__ import main
from experiments.data.batches import Batch
from experiments.data.tokens import BOS, EOS
from experiments.models import seq2seq
from experiments.studies import distill

pytestmark = pytest.mark.usefixtures("as_users_run")


def test_the_command_line_knows_every_way():
    assert distill.WAYS == distilling.WAYS


def made():
    """A batch of two short sentences, the second one shorter."""
    source = np.array([[5, 6, 7, EOS], [8, EOS, 0, 0]], np.int32)
    out = np.array([[6, 7, EOS], [9, EOS, 0]], np.int32)
    target = np.array([[BOS, 6, 7], [BOS, 9, 0]], np.int32)
    return Batch(source, target, out, source != 0, out != 0, np.array([3, 1], np.int32))


def test_a_batch_is_retold_in_the_teachers_words():
    told = distilling.retold(made(), {3: [7, EOS], 1: [6, 6, 6]})
    np.testing.assert_array_equal(told.target_out, [[7, EOS, 0], [6, 6, 6]])
    np.testing.assert_array_equal(told.target_in, [[BOS, 7, 0], [BOS, 6, 6]])
    np.testing.assert_array_equal(told.target_mask, [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(told.source, made().source)
    # Nothing said, not even an end.
    assert not distilling.retold(made(), {3: [], 1: [6]}).target_mask[0].any()


@pytest.mark.thorough
def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it():
    sizes = {"layers": 1, "heads": 2, "features": 8, "mlp_features": 8}
    vary = {"score_in": "cross", "source_vocab": 12, "target_vocab": 11}
    teacher = seq2seq.build("scaled_dot", seq2seq.Size(**sizes), seed=0, **vary)
    batch = made().arrays
    batch["teacher"] = distilling.shown(teacher, batch)
    graph, state = nnx.split(teacher)

    @jax.jit
    def losses(state, batch):
        student = nnx.merge(graph, state)
        plain = {**batch, "teacher": {"logits": batch["teacher"]["logits"]}}
        loss = distilling.Distillation(temperature=2.0, maps_weight=10.0, deeper=1)
        key = jax.random.key(0)
        return (
            loss(student, batch, key),
            loss(student, plain, key),
            seq2seq.loss(student, batch, key),
        )

    maps, logits, references = (float(x) for x in losses(state, batch))
    # Nothing but half the loss on the references is left, and every map is its own.
    assert logits == pytest.approx(references / 2, rel=1e-4)
    assert maps == pytest.approx(logits, abs=1e-4)
    other, _ = nnx.split(seq2seq.build("scaled_dot", seq2seq.Size(**sizes), seed=1, **vary))
    assert other == graph
    _, shifted = nnx.split(seq2seq.build("scaled_dot", seq2seq.Size(**sizes), seed=1, **vary))
    maps, logits, references = (float(x) for x in losses(shifted, batch))
    assert logits > references / 2 + 1e-3
    assert maps > logits + 1e-3


def test_a_layer_learns_from_the_last_of_its_share_of_the_teachers_layers():
    query = jax.random.normal(jax.random.key(0), (1, 3, 2, 4))
    look = AttentionInputs(query, query, query, None, None, None, None, None)
    paths = [f"encoder/layers/{layer}/self_attention" for layer in range(2)]
    loss = distilling.Distillation(temperature=1.0, maps_weight=1.0, deeper=2)
    apart = loss._apart({paths[1]: look[:2]}, paths[0], look, np.ones((1, 3), bool))
    assert float(apart) == pytest.approx(0, abs=1e-6)
    with pytest.raises(KeyError, match="layers/1"):
        loss._apart({paths[0]: look[:2]}, paths[0], look, np.ones((1, 3), bool))


@pytest.mark.thorough
def test_the_study_teaches_and_reports(tmp_path):
    folder = tmp_path / "run"
    ways = ["none", "logits and maps", "sequences"]
    small = (
        "--preset quick --steps 6 --teacher-steps 6 --batch-size 8 --teacher-features 16 "
        "--teacher-layers 1 --features 8 --heads 2 --train-size 40 --test-size 12"
    )
    assert main(["distill", *small.split(), "--ways", *ways, "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    summary = document["summary"]
    assert list(summary) == ["teacher", *ways]
    assert summary["teacher"]["parameters"] > 1.5 * summary["none"]["parameters"]
    models = {m["way"]: m for m in document["models"]}
    starts = [models[way]["observed"][0]["valid_loss"] for way in ways]
    assert starts == [starts[0]] * 3  # all students start alike
    assert len({models[way]["valid_loss"] for way in ways}) == 3  # and learn otherwise
    assert all(len(m["loss"]) == 6 and m["diverged_at"] is None for m in models.values())
    assert not (folder / "checkpoints").exists()
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 3
    for words in (
        "learnt to translate, so nothing can be said",
        "1606.07947",
        "other data, other scale: compare the shape",
        "quick: one seed",
    ):
        assert words in page
