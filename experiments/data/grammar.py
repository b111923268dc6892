"""The data set made from the English-German grammar: sampling by length, splits by hash.

A sentence belongs to the split that the hash of its English side says, whatever the seed: a tenth
are test, a tenth valid, the rest train; what is longer than any training sentence is test. So no
run, with any seed, trains on a sentence that any run tests on. The seed decides which training
sentences are drawn; valid and test are the same for all seeds, so that the spread over seeds is the
model's and not the test set's.

Training sentences have 3 to 25 words, 12 on average. The test split has the same number of
sentences in each length bucket. The last two buckets are longer than anything trained on: they ask
what a model does beyond its lengths, which is a question about positions as well as attention.

References:
    Bahdanau et al. 2014, 1409.0473, Figure 2: BLEU by sentence length, with and without attention.
"""

import functools
import hashlib
import random
from collections.abc import Iterator

from .dataset import Dataset, Pair, Split
from .derivation import Derivation, link

BUCKETS = ((3, 5), (6, 10), (11, 15), (16, 20), (21, 25), (26, 40), (41, 60))
# share of the training sentences by bucket: short ones are quick and teach the words
TRAIN_SHARES = {(3, 5): 0.15, (6, 10): 0.30, (11, 15): 0.27, (16, 20): 0.18, (21, 25): 0.10}
LONGEST_TRAINED = max(high for _, high in TRAIN_SHARES)
TRAIN_SIZE = 20_000
VALID_SIZE = 500
TEST_SIZE = 100 * len(BUCKETS)
_FIXED_SEED = 20_140_901  # of valid and test


def split_of(source: str) -> Split:
    """The split that a sentence belongs to, by hash.

    Example:
        >>> split_of("Anna sleeps .") == split_of("Anna sleeps .")
        True
    """
    fraction = (
        int.from_bytes(hashlib.blake2b(source.encode(), digest_size=4).digest(), "big") / 2**32
    )
    return "test" if fraction < 0.1 else "valid" if fraction < 0.2 else "train"


def sample(seed: int, words: int) -> Pair:
    """One pair whose English side has about ``words`` words (exactly so in four cases of five).

    Args:
        seed: All the randomness there is.
        words: Length to aim at, full stop included, at least 3.

    Returns:
        The pair, with its gold links.

    Example:
        >>> sample(0, 8) == sample(0, 8)
        True
    """
    if words < 3:
        raise ValueError(f"a sentence has at least 3 words, not words={words}")
    derivation = Derivation(random.Random(seed).random)
    english, german = derivation.sentence(words)
    return link(derivation.source(english), english, german)


def sentences(seed: int, low: int, high: int, split: Split | None = None) -> Iterator[Pair]:
    """Endless different pairs of ``low`` to ``high`` English words, of one split or of all.

    Every length in the range is aimed at equally often. Short ranges hold finitely many sentences:
    after 20,000 attempts without a new one the iterator ends.
    """
    chance = random.Random(seed * 10_007 + low * 101 + high).random
    seen: set[str] = set()
    idle = 0
    while idle < 20_000:
        idle += 1
        derivation = Derivation(chance)
        english, german = derivation.sentence(low + int(chance() * (high - low + 1)))
        if not low <= len(english) <= high:
            continue
        source = derivation.source(english)
        if source in seen or (split is not None and split_of(source) != split):
            continue
        idle = 0
        seen.add(source)
        yield link(source, english, german)


@functools.cache
def _held_out(split: Split, size: int) -> tuple[Pair, ...]:
    """Valid and test do not depend on the seed, so one process makes them once."""
    shares = TRAIN_SHARES if split == "valid" else dict.fromkeys(BUCKETS, 1 / len(BUCKETS))
    return _take(_FIXED_SEED, split, _parts(size, shares))


def _take(seed: int, split: Split, counts: dict[tuple[int, int], int]) -> tuple[Pair, ...]:
    pairs: list[Pair] = []
    for (low, high), count in counts.items():
        # the longest are nobody's training sentences, whatever their hash
        source = sentences(seed, low, high, split if low <= LONGEST_TRAINED else None)
        pairs += [pair for pair, _ in zip(source, range(count), strict=False)]
    random.Random(seed).shuffle(pairs)
    return tuple(pairs)


def _parts(total: int, shares: dict[tuple[int, int], float]) -> dict[tuple[int, int], int]:
    """``total`` by shares, the rounding given to the last."""
    counts = {bucket: int(total * share) for bucket, share in shares.items()}
    counts[list(shares)[-1]] += total - sum(counts.values())
    return counts


def load_grammar(*, seed: int, sizes: dict[Split, int | None]) -> Dataset:
    """The grammar as a data set; arguments as in :func:`experiments.data.load`."""
    train = _take(seed, "train", _parts(sizes.get("train") or TRAIN_SIZE, TRAIN_SHARES))
    valid = _held_out("valid", sizes.get("valid") or VALID_SIZE)
    test = _held_out("test", sizes.get("test") or TEST_SIZE)
    provenance = (
        f"Made on the spot by a synchronous English-German grammar (seed {seed}): verb-final "
        "clauses, separable verbs, agreement in gender, case and number, relative clauses, gold "
        "word alignment. Split by the hash of the English sentence: no test sentence is a training "
        "sentence of any seed."
    )
    return Dataset(
        name="grammar",
        source_language="English",
        target_language="German",
        train=train,
        valid=valid,
        test=test,
        unit="word",
        provenance=provenance,
        bleu_tokenize="none",
        buckets=BUCKETS,
    )
