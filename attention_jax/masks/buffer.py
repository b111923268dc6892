"""The masks of a buffer of keys that is filled step by step, as a cache is."""

from typing import Any

from attention_jax._core.record import pytree
from attention_jax._core.term import Sides
from attention_jax.masks.mask import Lengths, Mask, Verdict, View
from attention_jax.masks.patterns import Window


@pytree
class Written(Mask):
    """Keys in slots of a buffer that hold a real token."""

    slots: Any
    lost: Any

    def prepare(self, lengths: Lengths) -> Sides:
        """One flag for each slot."""
        if self.slots.shape[-1] != lengths.S:
            raise ValueError(
                f"the mask of a cache of {self.slots.shape[-1]} slots does not fit keys of length "
                f"S = {lengths.S}"
            )
        return Sides(key=self.slots[..., None, :])

    def per_head(self) -> "Written":
        """The flags are in the sides."""
        return Written(None, None)

    def spoiled(self) -> Any:
        """Examples that lost a token."""
        return None if self.lost is None else self.lost[..., None, None]

    def allowed(self, view: View) -> Any:
        """A written slot."""
        return view.sides.key

    def decide(self, low: View, high: View) -> Verdict:
        """Any and all of the flags."""
        return Verdict(high.sides.key, low.sides.key)


@pytree
class Latest(Window):
    """The window of keys that a rolling buffer holds, `left` before the query's own."""

    def latest(self) -> int | None:
        """The buffer's length."""
        return None if self.left is None else self.left + 1
