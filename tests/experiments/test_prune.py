"""The study of pruning: which heads go in which order, and the report."""

import json

import pytest

from experiments import heads
from experiments.__main__ import main
from experiments.studies import prune
from experiments.studies.prune import build_report

pytestmark = pytest.mark.usefixtures("as_users_run")

WORTH = {
    "encoder/layers/0/self_attention": [0.9, 0.1, 0.5],
    "decoder/layers/0/self_attention": [0.2, 0.3, 0.4],
    "decoder/layers/0/cross_attention": [0.05, 0.7, 0.6],
}


def test_the_least_important_go_first_and_each_attention_keeps_one():
    (order, _, gone), *drawn = heads.orders(WORTH, "self", draws=3, seed=0)
    assert order == "importance"
    encoder, decoder, cross = WORTH
    assert gone == [(encoder, 1), (decoder, 0), (decoder, 1), (encoder, 2)]
    for order, _, heads_gone in drawn:
        assert order == "random"
        assert len(set(heads_gone)) == 4
        assert {path for path, _ in heads_gone} == {encoder, decoder}
    assert len({tuple(heads_gone) for _, _, heads_gone in drawn}) > 1
    (_, _, gone), *_ = heads.orders(WORTH, "cross", draws=0, seed=0)
    assert gone == [(cross, 0), (cross, 2)]


def test_the_command_line_knows_every_part():
    assert prune.PARTS == heads.PARTS


@pytest.mark.thorough
def test_the_study_trains_prunes_and_reports(tmp_path):
    folder = tmp_path / "run"
    small = (
        "--preset quick --steps 6 --batch-size 8 --layers 1 --heads 2 --features 8 "
        "--train-size 60 --test-size 12 --points 1"
    )
    assert main(["prune", *small.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["status"] == "finished"
    for part, count in (("self", 4), ("cross", 2)):
        found = document["parts"][part]
        assert found["heads"] == count
        assert found["removed"] == [0, count // 2]
        for measure in ("bleu", "valid_loss"):
            by_order = found[measure]
            assert all(len(values) == 1 for rows in by_order.values() for values in rows)
            assert by_order["importance"][0] == by_order["random"][0]
        # A head that is gone is missed, if only in the loss.
        (before,), (after,) = found["valid_loss"]["importance"]
        assert before != after
    (model,) = document["models"]
    assert all(sum(x * x for x in row) == pytest.approx(1) for row in model["importance"].values())
    for made in model["pruned"]:
        assert made["parameters"] < model["parameters"]
        assert made["difference"] < 1e-4
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 2
    for words in ("1905.10650", "other data, other scale: compare the shape", "quick: one seed"):
        assert words in page
    assert "It has not learnt to translate in 6 steps" in page
    # The same numbers, had it learnt to translate.
    for part, last in (("self", 45.0), ("cross", 20.0)):
        document["parts"][part]["bleu"] = {order: [[50.0], [last]] for order in prune.ORDERS}
    said = " ".join(build_report(document, folder).answer)
    assert "0 go with at most 2 % of BLEU lost" in said
    assert "2 heads of self-attention cost 10 % of BLEU and 1 heads of attention to the" in said
    assert "source cost 60 % of BLEU; attention to the source bears it least" in said
