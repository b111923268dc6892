"""How good a translation is, and how good an alignment.

Symbols: A the links a model says, S the sure gold links, P ⊇ S the possible ones; in shapes, T and
S are the target's and the source's length, as everywhere.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.errors import UsageError

Links = Sequence[tuple[int, int]]  # (source position, target position), from 0


@dataclasses.dataclass(frozen=True)
class TranslationScore:
    """Corpus scores, 0 to 100.

    Attributes:
        sentences: How many sentences were scored.
        bleu: BLEU, or None where there was nothing to score.
        chrf: chrF2, likewise.
        low: Shortest source length of this bucket, or None for the whole.
        high: Longest source length of this bucket, or None for the whole.
        signature: sacrebleu's signature of the BLEU score: version, tokeniser, smoothing.
    """

    sentences: int
    bleu: float | None
    chrf: float | None
    low: int | None = None
    high: int | None = None
    signature: str = ""


def translation_score(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a"
) -> TranslationScore:
    """Corpus BLEU and chrF2 against one reference each, by sacrebleu.

    BLEU = 100 · min(1, exp(1 − r/c)) · (p_1 p_2 p_3 p_4)^(1/4)

    with clipped n-gram precisions p_n over the corpus, c and r the lengths of hypotheses and
    references; a precision of 0 is smoothed exponentially. Where no hypothesis has four tokens the
    longer n-grams are left out of the mean. chrF2 is the F-score of character 1- to 6-grams with
    recall weighted twice.

    Args:
        hypotheses: Translations, detokenised.
        references: As many references.
        tokenize: sacrebleu's tokeniser: "13a", "zh", "char", or "none" for text whose tokens are
            joined by blanks already (``Dataset.bleu_tokenize`` knows).

    Returns:
        The scores; None for both where there are no sentences.

    Raises:
        ValueError: The lists differ in length.

    Example:
        >>> translation_score(["a b c d"], ["a b c d"], tokenize="none").bleu
        100.0

    References:
        Papineni et al. 2002, BLEU, ACL, §2. Popović 2015, chrF, WMT. Post 2018, A call for clarity
        in reporting BLEU scores, 1804.08771.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if not hypotheses:
        return TranslationScore(0, None, None)
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise UsageError(
            "BLEU needs the package sacrebleu: pip install 'attention_jax[experiments]'"
        ) from error
    bleu = BLEU(tokenize=tokenize, effective_order=True, force=True)
    score = bleu.corpus_score(list(hypotheses), [list(references)]).score
    chrf = CHRF().corpus_score(list(hypotheses), [list(references)]).score
    # exp(log(...)) leaves 100.00000000000004
    return TranslationScore(
        len(hypotheses), min(score, 100.0), min(chrf, 100.0), signature=str(bleu.get_signature())
    )


def scores_by_length(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lengths: Sequence[int],
    buckets: Sequence[tuple[int, int]],
    *,
    tokenize: str = "13a",
) -> list[TranslationScore]:
    """One :func:`translation_score` for each range of source lengths, both ends included.

    Args:
        hypotheses: Translations.
        references: As many references.
        lengths: As many source lengths (``Dataset.lengths("test")``).
        buckets: ``(low, high)`` ranges (``Dataset.buckets``).
        tokenize: As for :func:`translation_score`.

    Returns:
        One score a bucket, in order; an empty bucket has 0 sentences and None for its scores.
    """
    if not len(hypotheses) == len(references) == len(lengths):
        raise ValueError(
            f"{len(hypotheses)} hypotheses, {len(references)} references and {len(lengths)} lengths"
        )
    scores = []
    for low, high in buckets:
        inside = [i for i, length in enumerate(lengths) if low <= length <= high]
        score = translation_score(
            [hypotheses[i] for i in inside], [references[i] for i in inside], tokenize=tokenize
        )
        scores.append(dataclasses.replace(score, low=low, high=high))
    return scores


def link_targets(
    weights: np.ndarray, source_length: int, target_length: int
) -> list[tuple[int, int]]:
    """A = {(argmax_s weights[t, s], t)}: each target word linked to what it attends to most.

    Row t is the decoder's step that says target word t, that is the step whose input is word t − 1.

    Args:
        weights: [T, S] attention weights of one sentence, heads averaged; padding may follow.
        source_length: Source words; the end sign and padding behind them are not considered.
        target_length: Target words, likewise.

    Returns:
        ``target_length`` links (source, target), none where the source is empty.

    Raises:
        ValueError: The weights are smaller than the lengths.

    Example:
        >>> link_targets(np.array([[0.1, 0.9], [0.6, 0.4]]), 2, 2)
        [(1, 0), (0, 1)]
    """
    weights = np.asarray(weights)
    if weights.ndim != 2 or weights.shape[0] < target_length or weights.shape[1] < source_length:
        raise ValueError(
            f"weights {weights.shape} must be [T, S], T >= {target_length} and S >= {source_length}"
        )
    if source_length == 0:
        return []
    best = weights[:target_length, :source_length].argmax(1)
    return [(int(s), t) for t, s in enumerate(best)]


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
