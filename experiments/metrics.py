"""How good a translation is, and how good an alignment.

Symbols: A the links a model says, S the sure gold links, P ⊇ S the possible ones; in shapes, T and
S are the target's and the source's length, as everywhere.
"""

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from experiments.data.dataset import Pair
from experiments.errors import UsageError

Links = Sequence[tuple[int, int]]  # (source position, target position), from 0


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> float:
    """Corpus BLEU against one reference each, 0 to 100, by sacrebleu.

    BLEU = 100 · min(1, exp(1 − r/c)) · (p_1 p_2 p_3 p_4)^(1/4)

    with clipped n-gram precisions p_n over the corpus, c and r the lengths of hypotheses and
    references; a precision of 0 is smoothed exponentially. Where no hypothesis has four tokens the
    longer n-grams are left out of the mean.

    Args:
        hypotheses: Translations, detokenised; at least one.
        references: As many references.
        tokenize: sacrebleu's tokeniser: "13a", "zh", "char", or "none" for text whose tokens are
            joined by blanks already (``Dataset.bleu_tokenize`` knows).

    Raises:
        ValueError: The lists differ in length, or are empty.

    Example:
        >>> bleu(["a b c d"], ["a b c d"], tokenize="none")
        100.0

    References:
        Papineni et al. 2002, BLEU, ACL, §2. Post 2018, A call for clarity in reporting BLEU scores,
        1804.08771.
    """
    _check(hypotheses, references)
    score = _bleu(tokenize).corpus_score(list(hypotheses), [list(references)]).score
    return min(float(score), 100.0)  # exp(log(...)) leaves 100.00000000000004


def signature(tokenize: str = "13a") -> str:
    """How :func:`bleu` scores, in sacrebleu's short form: version, tokeniser, smoothing."""
    metric = _bleu(tokenize)
    metric.corpus_score(["a"], [["a"]])  # it counts the references before it can tell
    return str(metric.get_signature())


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2 against one reference each, 0 to 100, by sacrebleu.

    chrF2 = 100 · 5 P R / (4 P + R)

    with P and R the means over n = 1 ... 6 of precision and recall of character n-grams, blanks
    not counted. No tokeniser has a say in it.

    Args:
        hypotheses: Translations, detokenised; at least one.
        references: As many references.

    Raises:
        ValueError: The lists differ in length, or are empty.

    Example:
        >>> chrf(["ab"], ["ac"])
        25.0

    References:
        Popović 2015, chrF: character n-gram F-score, WMT.
    """
    _check(hypotheses, references)
    score = _sacrebleu().CHRF().corpus_score(list(hypotheses), [list(references)]).score
    return min(float(score), 100.0)


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"{len(hypotheses)} hypotheses and {len(references)} references must be as many, "
            "and at least one"
        )


def _sacrebleu() -> ModuleType:
    try:
        import sacrebleu
    except ImportError as error:
        raise UsageError(
            "BLEU needs the package sacrebleu: pip install 'attention_jax[experiments]'"
        ) from error
    return sacrebleu


def _bleu(tokenize: str):
    # force: the text of closed vocabularies is tokenised already, and sacrebleu would warn of it
    return _sacrebleu().BLEU(tokenize=tokenize, effective_order=True, force=True)


@dataclasses.dataclass(frozen=True)
class LengthScore:
    """Scores of the sentences whose source has ``low`` to ``high`` words, both included.

    ``bleu`` and ``chrf`` are None where there is no such sentence.
    """

    low: int
    high: int
    sentences: int
    bleu: float | None
    chrf: float | None


def scores_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lengths: Sequence[int],
    buckets: Sequence[tuple[int, int]],
    *,
    tokenize: str = "13a",
) -> list[LengthScore]:
    """BLEU and chrF for each range of source lengths.

    Args:
        hypotheses: Translations.
        references: As many references.
        lengths: As many source lengths (``Dataset.lengths("test")``).
        buckets: ``(low, high)`` ranges (``Dataset.buckets``).
        tokenize: As for :func:`bleu`.

    Returns:
        One score a bucket, in order, empty ones too.

    Raises:
        ValueError: The three lists differ in length.
    """
    if not len(hypotheses) == len(references) == len(lengths):
        raise ValueError(
            f"{len(hypotheses)} hypotheses, {len(references)} references and {len(lengths)} "
            "lengths must be as many"
        )
    scores = []
    for low, high in buckets:
        inside = [i for i, length in enumerate(lengths) if low <= length <= high]
        said, meant = [hypotheses[i] for i in inside], [references[i] for i in inside]
        found = (
            (bleu(said, meant, tokenize=tokenize), chrf(said, meant)) if inside else (None, None)
        )
        scores.append(LengthScore(low, high, len(inside), *found))
    return scores


def link_targets(weights: np.ndarray) -> list[tuple[int, int]]:
    """A = {(argmax_s weights[t, s], t)}: each target word linked to what it attends to most.

    Args:
        weights: [T, S] attention weights of one sentence, heads averaged, the rows and columns of
            the end signs and of padding cut off. Row t is the decoder's step that says target word
            t, that is the step whose input is word t − 1.

    Returns:
        T links (source, target), none where S is 0.

    Example:
        >>> link_targets(np.array([[0.1, 0.9], [0.6, 0.4]]))
        [(1, 0), (0, 1)]
    """
    weights = np.asarray(weights)
    if weights.ndim != 2:
        raise ValueError(
            f"weights {weights.shape} must be [T, S], one sentence with heads averaged"
        )
    if weights.shape[1] == 0:
        return []
    return [(int(s), t) for t, s in enumerate(weights.argmax(1))]


def alignment_error_rate(
    said: Sequence[Links], sure: Sequence[Links], possible: Sequence[Links] | None = None
) -> float:
    """AER = 1 − (|A ∩ S| + |A ∩ P|) / (|A| + |S|), over all sentences together.

    0 if every sure link is said and every said link is possible; 1 if no said link is. Equal to
    1 − F1 where every possible link is sure.

    Args:
        said: A, the links said of each sentence.
        sure: S, the sure gold links of each.
        possible: P; every sure link counts as possible, named here or not. None is S.

    Returns:
        The rate, 0 to 1; NaN where there is no link at all.

    Raises:
        ValueError: The lists differ in length.

    Example:
        >>> alignment_error_rate([[(0, 0), (1, 1)]], [[(0, 0)]], [[(0, 0), (1, 1)]])
        0.0

    References:
        Och and Ney 2003, A systematic comparison of various statistical alignment models,
        Computational Linguistics 29(1), the section on evaluation.
    """
    possible = sure if possible is None else possible
    if not len(said) == len(sure) == len(possible):
        raise ValueError(
            f"{len(said)} sentences of links, {len(sure)} of sure, {len(possible)} of possible ones"
        )
    hits = total = 0
    for a_links, s_links, p_links in zip(said, sure, possible, strict=True):
        a, s = set(a_links), set(s_links)
        hits += len(a & s) + len(a & (s | set(p_links)))
        total += len(a) + len(s)
    return 1 - hits / total if total else float("nan")


def alignment_error(weights: Sequence[np.ndarray], pairs: Sequence[Pair]) -> float:
    """:func:`alignment_error_rate` of :func:`link_targets` against the pairs' gold alignment.

    Args:
        weights: [T, S] for each sentence, as for :func:`link_targets`.
        pairs: As many pairs, their alignment known.

    Returns:
        The rate, 0 to 1.

    Raises:
        ValueError: A pair has no alignment, or the lists differ in length.
    """
    sure, possible = zip(*(pair.gold() for pair in pairs), strict=True)
    return alignment_error_rate([link_targets(w) for w in weights], sure, possible)
