"""BLEU, chrF and the alignment error rate against values worked out by hand."""

import math

import numpy as np
import pytest

from experiments.metrics import (
    alignment_error_rate,
    link_targets,
    scores_by_length,
    translation_score,
)


def test_bleu_by_hand():
    # 4/5 words, 3/4 pairs, 2/3 triples, 1/2 quadruples
    score = translation_score(["a b c d e"], ["a b c d f"], tokenize="none")
    assert score.bleu == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # everything right but one word short: the brevity penalty alone
    score = translation_score(["a b c d"], ["a b c d e"], tokenize="none")
    assert score.bleu == pytest.approx(100 * math.exp(1 - 5 / 4))
    # the corpus is one text: counts are summed before they are divided
    score = translation_score(["a b c d", "x x x x x"], ["a b c d", "y y y y y"], tokenize="none")
    assert score.bleu == pytest.approx(100 * (4 / 9 * 3 / 7 * 2 / 5 * 1 / 3) ** 0.25)
    assert score.sentences == 2
    assert "tok:none" in score.signature


def test_bleu_of_sentences_shorter_than_four_words():
    assert translation_score(["a b c"], ["a b c"], tokenize="none").bleu == pytest.approx(100)
    assert translation_score(["a b"], ["a c"], tokenize="none").bleu < 60


def test_chrf_by_hand():
    # one letter of two, no pair of letters of one: (1/2 + 0/1) / 2
    assert translation_score(["ab"], ["ac"]).chrf == pytest.approx(25)
    assert translation_score(["a b c"], ["abc"]).chrf == pytest.approx(100)


def test_tokenisers_differ():
    hypothesis, reference = ["今天天气很好"], ["今天天气很坏"]
    assert translation_score(hypothesis, reference, tokenize="zh").bleu > 60
    assert translation_score(hypothesis, reference, tokenize="none").bleu < 1
    marks = ["a b c d."], ["a b c d ."]
    assert translation_score(*marks, tokenize="13a").bleu == pytest.approx(100)
    assert translation_score(*marks, tokenize="none").bleu < 90


def test_scores_by_length():
    scores = scores_by_length(
        ["a b c d", "x", "e f g h"],
        ["a b c d", "y", "e f g h"],
        [4, 1, 9],
        [(1, 3), (4, 4), (5, 8), (9, 20)],
        tokenize="none",
    )
    assert [s.sentences for s in scores] == [1, 1, 0, 1]
    assert [(s.low, s.high) for s in scores] == [(1, 3), (4, 4), (5, 8), (9, 20)]
    assert scores[0].bleu < 1
    assert scores[1].bleu == scores[3].bleu == pytest.approx(100)
    assert scores[2].bleu is None
    assert scores[2].chrf is None


def test_nothing_to_score():
    score = translation_score([], [])
    assert (score.sentences, score.bleu, score.chrf) == (0, None, None)


def test_links_of_attention():
    weights = np.array([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.0, 0.4, 0.6], [1, 0, 0]], np.float32)
    assert link_targets(weights, 3, 3) == [(2, 0), (0, 1), (2, 2)]
    # the third column is the end sign: it is no word
    assert link_targets(weights, 2, 3) == [(1, 0), (0, 1), (1, 2)]
    assert link_targets(weights, 0, 3) == []
    with pytest.raises(ValueError, match=r"weights \(4, 3\) must be \[T, S\], T >= 5 and S >= 3"):
        link_targets(weights, 3, 5)


def test_alignment_error_by_hand():
    said = [[(0, 0), (1, 1), (2, 2)]]
    sure = [[(0, 0), (1, 1)]]
    # 2 sure hits, 2 possible hits, 3 said and 2 sure
    assert alignment_error_rate(said, sure) == pytest.approx(1 - 4 / 5)
    assert alignment_error_rate(said, sure, [[(2, 2)]]) == 0
    assert alignment_error_rate([[(5, 5)]], sure) == 1
    # sentences are summed, not averaged: (1 + 1 + 0 + 0) / (1 + 1 + 2 + 1)
    two = alignment_error_rate([[(0, 0)], [(1, 0), (1, 1)]], [[(0, 0)], [(0, 0)]])
    assert two == pytest.approx(1 - 2 / 5)
    assert math.isnan(alignment_error_rate([[]], [[]]))


def test_perfect_attention_on_the_grammar_has_no_alignment_error():
    from experiments.data.grammar import sample

    pairs = [sample(seed, 12) for seed in range(20)]
    said = []
    for pair in pairs:
        weights = np.zeros((pair.target.count(" ") + 2, pair.source.count(" ") + 2))
        for s, t in pair.possible:
            weights[t, s] = 0.5
        for s, t in pair.alignment:
            weights[t, s] = 1
        said.append(link_targets(weights, weights.shape[1] - 1, weights.shape[0] - 1))
    gold = [p.alignment for p in pairs], [p.possible for p in pairs]
    assert alignment_error_rate(said, *gold) == 0
    assert alignment_error_rate(said, gold[0]) > 0


def test_mistakes():
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        translation_score(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="1 hypotheses, 1 references and 0 lengths"):
        scores_by_length(["a"], ["a"], [], [])
    with pytest.raises(ValueError, match="1 sentences of links, 0 of sure, 0 of possible"):
        alignment_error_rate([[]], [])
