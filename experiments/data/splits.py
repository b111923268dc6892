"""Train, valid and test for pairs that come without: by hash, near-duplicates kept together.

The key of a pair is its source in lower case with digits, underscores and punctuation taken as
blanks, so "Page 3." and "page 4" fall into one split. Groups of the same key are ordered by the
hash of the key; the first 5 % of the pairs are valid, the next 5 % test (each 1,000 pairs at most
and one group at least). The order of the rows and the seed play no part.
"""

import hashlib
import random
import re
from collections.abc import Sequence

from .dataset import SPLITS, DataError, Pair, Split

_NOT_A_LETTER = re.compile(r"[\W\d_]+")
HELD_OUT = 0.05  # of the pairs, for each of valid and test
HELD_OUT_MOST = 1_000


def split_key(source: str) -> str:
    """What decides the split of a source.

    Example:
        >>> split_key("Page 3 of 4.") == split_key("page 12, of 7!")
        True
    """
    return _NOT_A_LETTER.sub(" ", source.lower()).strip()


def split_pairs(
    name: str, pairs: Sequence[Pair], splits: Sequence[Split] = SPLITS
) -> dict[Split, list[Pair]]:
    """Deals pairs out to ``splits`` (train among them), each in the order of ``pairs``.

    Raises:
        DataError: There are fewer different sources than splits.
    """
    groups: dict[str, list[int]] = {}
    for number, pair in enumerate(pairs):
        groups.setdefault(split_key(pair.source), []).append(number)
    if len(groups) < len(splits):
        raise DataError(
            f"{name}: {len(groups)} different sources cannot fill {', '.join(splits)}; "
            f"it needs at least {len(splits)}"
        )
    order = sorted(groups, key=lambda key: hashlib.sha256(key.encode()).digest(), reverse=True)
    wanted = max(1, min(HELD_OUT_MOST, round(HELD_OUT * len(pairs))))
    where: dict[int, Split] = {}
    held_out: list[Split] = [split for split in splits if split != "train"]
    for done, split in enumerate(held_out, 1):
        others = len(splits) - done  # each of them still needs a group
        count = 0
        while count == 0 or (count < wanted and len(order) > others):
            members = groups[order.pop()]
            for member in members:
                where[member] = split
            count += len(members)
    result: dict[Split, list[Pair]] = {split: [] for split in splits}
    for number, pair in enumerate(pairs):
        result[where.get(number, "train")].append(pair)
    return result


def at_most(items: Sequence, size: int | None, seed: int) -> list:
    """``size`` of the items, chosen by ``seed``, in their own order; all if there are fewer."""
    if size is None or size >= len(items):
        return list(items)
    return [items[i] for i in sorted(random.Random(seed).sample(range(len(items)), size))]


def limited(
    splits: dict[Split, list[Pair]], sizes: dict[Split, int | None], seed: int
) -> dict[Split, tuple[Pair, ...]]:
    """Splits cut to ``sizes``; only the choice among the training pairs depends on the seed."""
    return {
        split: tuple(at_most(pairs, sizes.get(split), seed if split == "train" else 0))
        for split, pairs in splits.items()
    }


def counts(splits: dict[Split, tuple[Pair, ...]]) -> str:
    """Sizes of the splits, and how many test sources were seen in training, as a sentence."""
    trained = {pair.source for pair in splits["train"]}
    seen = sum(pair.source in trained for pair in splits["test"])
    sizes = ", ".join(f"{len(splits[split]):,} {split}" for split in SPLITS)
    return f"{sizes} pairs; {seen} of the test sources also occur in train."
