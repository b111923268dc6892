"""BLEU, chrF and the alignment error rate against values worked out by hand."""

import math

import numpy as np
import pytest

from experiments.data.grammar import Pair, sentence
from experiments.metrics import (
    alignment_error,
    bleu,
    chrf,
    link_targets,
)


def test_bleu_by_hand():
    # 4/5 words, 3/4 pairs, 2/3 triples, 1/2 quadruples
    score = bleu(["a b c d e"], ["a b c d f"], tokenize="none")
    assert score == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # everything right but one word short: the brevity penalty alone
    score = bleu(["a b c d"], ["a b c d e"], tokenize="none")
    assert score == pytest.approx(100 * math.exp(1 - 5 / 4))
    # the corpus is one text: counts are summed before they are divided
    score = bleu(["a b c d", "x x x x x"], ["a b c d", "y y y y y"], tokenize="none")
    assert score == pytest.approx(100 * (4 / 9 * 3 / 7 * 2 / 5 * 1 / 3) ** 0.25)


def test_bleu_of_sentences_shorter_than_four_words():
    assert bleu(["a b c"], ["a b c"], tokenize="none") == pytest.approx(100)
    assert bleu(["a b"], ["a c"], tokenize="none") < 60


def test_chrf_by_hand():
    # one letter of two, no pair of letters of one: (1/2 + 0/1) / 2
    assert chrf(["ab"], ["ac"]) == pytest.approx(25)
    # precision 1 for one letter, recall 1/2; no pair: P 1, R 1/2
    assert chrf(["a"], ["ab"]) < chrf(["ab"], ["a"])
    assert chrf(["a b c"], ["abc"]) == pytest.approx(100)


def test_tokenisers_differ():
    hypothesis, reference = ["今天天气很好"], ["今天天气很坏"]
    assert bleu(hypothesis, reference, tokenize="zh") > 60
    assert bleu(hypothesis, reference, tokenize="none") < 1
    marks = ["a b c d."], ["a b c d ."]
    assert bleu(*marks, tokenize="13a") == pytest.approx(100)
    assert bleu(*marks, tokenize="none") < 90


def test_links_of_attention():
    weights = np.array([[0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.0, 0.4, 0.6]], np.float32)
    assert link_targets(weights) == [(2, 0), (0, 1), (2, 2)]
    assert link_targets(weights[:2, :2]) == [(1, 0), (0, 1)]
    assert link_targets(weights[:, :0]) == []
    with pytest.raises(ValueError, match=r"weights \(1, 3, 3\) must be \[T, S\]"):
        link_targets(weights[None])


def error(found, sure, possible=None):
    """Of sentences whose words do not matter, by their links."""
    possible = sure if possible is None else possible
    return alignment_error(found, [Pair("", "", *p) for p in zip(sure, possible, strict=True)])


def test_alignment_error_by_hand():
    found = [[(0, 0), (1, 1), (2, 2)]]
    sure = [((0, 0), (1, 1))]
    # 2 sure hits, 2 possible hits, 3 found and 2 sure
    assert error(found, sure) == pytest.approx(1 - 4 / 5)
    assert error(found, sure, [((2, 2),)]) == 0  # a sure link is possible, named there or not
    assert error([[(5, 5)]], sure) == 1
    # sentences are summed, not averaged: (1 + 1 + 0 + 0) / (1 + 1 + 2 + 1)
    two = error([[(0, 0)], [(1, 0), (1, 1)]], [((0, 0),), ((0, 0),)])
    assert two == pytest.approx(1 - 2 / 5)
    assert math.isnan(error([[]], [()]))


def test_alignment_error_of_weights():
    pairs = [Pair("a b", "y x", ((0, 1), (1, 0)), ((0, 1), (1, 0))), Pair("a", "x z", ((0, 0),))]
    weights = [np.array([[0.2, 0.8], [0.7, 0.3]]), np.array([[1.0], [1.0]])]
    # all right but the last link: (3 + 3) / (4 + 3)
    found = [link_targets(w) for w in weights]
    assert alignment_error(found, pairs) == pytest.approx(1 - 6 / 7)


def test_perfect_attention_on_the_grammar_has_no_alignment_error():
    pairs = [sentence(seed, 0, 12, 12) for seed in range(20)]
    weights = [np.zeros((p.target.count(" ") + 1, p.source.count(" ") + 1)) for p in pairs]
    for pair, w in zip(pairs, weights, strict=True):
        w[tuple(np.array(pair.possible).T[::-1])] = 0.5
        w[tuple(np.array(pair.alignment).T[::-1])] = 1
    assert alignment_error([link_targets(w) for w in weights], pairs) == 0
    assert alignment_error([link_targets(w[:, ::-1]) for w in weights], pairs) > 0.8


def test_mistakes():
    with pytest.raises(ValueError, match="1 hypotheses and 2 references must be as many"):
        bleu(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="0 hypotheses and 0 references"):
        chrf([], [])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        alignment_error([], [Pair("a", "b")])
    with pytest.raises(ValueError, match="no alignment is known of 'a' and 'b'"):
        alignment_error([[(0, 0)]], [Pair("a", "b")])
