"""The masks of caches, and the checks of masks over rolling caches."""

from typing import Any

from attention_jax._core.pytrees import pytree
from attention_jax._core.term import Sides
from attention_jax.masks.mask import Interval, Lengths, Mask, Verdict, View, intersection
from attention_jax.masks.patterns import Window


@pytree
class Written(Mask):
    """The mask of slots with a real token."""

    slots: Any
    full: Any

    def prepare(self, lengths: Lengths) -> Sides:
        """One flag for each slot."""
        if self.slots.shape[-1] != lengths.S:
            raise ValueError(
                f"the mask of a cache of {self.slots.shape[-1]} slots does not fit keys of length "
                f"S = {lengths.S}"
            )
        return Sides(key=self.slots[..., None, :])

    def by_index(self) -> tuple[Mask, ...]:
        """None: the slots are those of the cache."""
        return ()

    def per_head(self) -> "Written":
        """The flags are in the sides."""
        return Written(None, None)

    def overflowed(self) -> Any:
        """Examples that overflowed."""
        return None if self.full is None else self.full[..., None, None]

    def allowed(self, view: View) -> Any:
        """A written slot."""
        return view.sides.key

    def decide(self, low: View, high: View) -> Verdict:
        """Any and all of the flags."""
        return Verdict(high.sides.key, low.sides.key)


@pytree
class Latest(Window):
    """The window of keys in a rolling buffer, `left` before the query's position."""

    def latest(self) -> int | None:
        """The buffer's length."""
        return None if self.left is None else self.left + 1


def check_reach(length: int, interval: Interval) -> None:
    """Checks that a buffer of the latest `length` keys holds all visible keys of a query.

    Raises:
        ValueError: If `interval` begins before the buffer, or has no known lower bound.
    """
    if interval.left is not None and interval.left < length:
        return
    if interval.left is None:
        reach = "the mask does not bound the distance of visible keys"
        way = f"a mask with window({length - 1}, 0)"
    else:
        reach = f"{interval.left + 1} tokens are visible to a query, including itself"
        way = f"a rolling cache of length {interval.left + 1}"
    raise ValueError(
        f"a rolling cache of length {length} holds only the latest {length} tokens, but {reach}: "
        f"use {way}, or a cache that is not rolling"
    )


def rolling_length(mask: Mask | None) -> int | None:
    """The length of a rolling cache whose mask is a part of a conjunction; None without one."""
    lengths = [part.latest() for part in (() if mask is None else mask.conjuncts())]
    return min((length for length in lengths if length is not None), default=None)


def over_rolling_cache(mask: Mask, length: int) -> Mask:
    """The mask by position.

    Raises:
        ValueError: If it is longer than `length`, or depends on the array index of keys.
    """
    interval = intersection(*(part for part in mask.conjuncts() if part.latest() is None))
    if interval.left is not None:
        check_reach(length, interval)
    mask = mask.by_position()
    if indexed := mask.by_index():
        refuse_index("mask", indexed[0], length)
    return mask


def refuse_index(name: str, given: object, length: int) -> None:
    """Raises for an argument that depends on the array index of keys in a rolling cache."""
    raise ValueError(
        f"{name} {given!r} depends on the array index of a key, but a rolling cache of length "
        f"{length} does not store keys in the order of positions: use a {name} of positions, "
        "or a cache that is not rolling"
    )
