"""BLEU, chrF and the alignment error rate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.data.grammar import Link, Pair
from experiments.errors import UsageError


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> float:
    """Corpus BLEU against one reference each, 0 to 100, by sacrebleu.

        BLEU = 100 · min(1, exp(1 − r/c)) · (p_1 p_2 p_3 p_4)^(1/4)

    with clipped n-gram precisions p_n over the corpus, c and r the lengths of hypotheses and
    references; a precision of 0 is smoothed exponentially. If no hypothesis has four tokens, the
    longer n-grams are excluded from the mean.

    Args:
        hypotheses: translations, detokenised; at least one.
        references: as many references.
        tokenize: sacrebleu's tokeniser: "13a", "zh", "char", or "none" for text whose tokens are
            joined by blanks (``Dataset.bleu_tokenize``).

    Example:
        >>> bleu(["a b c d"], ["a b c d"], tokenize="none")
        100.0

    References:
        Papineni et al. 2002, BLEU, ACL, §2. Post 2018, A call for clarity in reporting BLEU scores,
        1804.08771.
    """
    # force: the text of closed vocabularies is tokenised already, and sacrebleu would warn of it
    options = {"tokenize": tokenize, "effective_order": True, "force": True}
    return _corpus_score("BLEU", hypotheses, references, **options)


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2 against one reference each, 0 to 100, by sacrebleu.

        chrF2 = 100 · 5 P R / (4 P + R)

    with P and R the means over n = 1 ... 6 of precision and recall of character n-grams, blanks
    not counted.

    Example:
        >>> chrf(["ab"], ["ac"])
        25.0

    References:
        Popović 2015, chrF: character n-gram F-score, WMT.
    """
    return _corpus_score("CHRF", hypotheses, references)


def _corpus_score(
    metric: str, hypotheses: Sequence[str], references: Sequence[str], **options: Any
) -> float:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"{len(hypotheses)} hypotheses and {len(references)} references must be as many, "
            "and at least one"
        )
    try:
        import sacrebleu
    except ImportError as error:
        raise UsageError(
            "BLEU needs the package sacrebleu: pip install 'attention_jax[experiments]'"
        ) from error
    scorer = getattr(sacrebleu, metric)(**options)
    score = scorer.corpus_score(list(hypotheses), [list(references)]).score
    return min(float(score), 100.0)  # exp(log(...)) leaves 100.00000000000004


def link_targets(weights: np.ndarray) -> list[Link]:
    """Return A = {(argmax_s weights[t, s], t)}: each target word with its largest weight.

    Args:
        weights: ``[T, S]`` of one sentence, heads averaged, without end signs and padding. Row t is
            the decoder's step that predicts target word t.

    Example:
        >>> link_targets(np.array([[0.1, 0.9], [0.6, 0.4]]))
        [(1, 0), (0, 1)]
    """
    if weights.ndim != 2:
        raise ValueError(
            f"weights {weights.shape} must be [T, S], one sentence with heads averaged"
        )
    return [(int(s), t) for t, s in enumerate(weights.argmax(1))] if weights.shape[1] else []


def alignment_error(found: Sequence[Sequence[Link]], pairs: Sequence[Pair]) -> float:
    """Return AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|), over all sentences together.

    0 if every sure link S is found and every found link A is possible (P, which contains S); 1 if
    no found link is.

    Args:
        found: A, the links of each sentence.
        pairs: as many pairs, with their gold alignment.

    Returns:
        The rate, 0 to 1; NaN if there are no links.

    Example:
        >>> alignment_error([[(0, 0), (1, 1)]], [Pair("a b", "c d", ((0, 0),), ((0, 0), (1, 1)))])
        0.0

    References:
        Och and Ney 2003, A systematic comparison of various statistical alignment models,
        Computational Linguistics 29(1), the section on evaluation.
    """
    hits = total = 0
    for links, pair in zip(found, pairs, strict=True):
        if pair.alignment is None:
            raise ValueError(f"no alignment is known of {pair.source!r} and {pair.target!r}")
        links, sure = set(links), set(pair.alignment)
        hits += len(links & sure) + len(links & (sure | set(pair.possible or ())))
        total += len(links) + len(sure)
    return 1 - hits / total if total else float("nan")
