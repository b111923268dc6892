"""Which kernel, and why: what `explain` shows and `attend` follows.

One piece of code decides. `choose` asks each candidate's `why_not` in order and keeps the answers;
`make_plan` adds what can be counted without running: blocks, FLOPs, bytes, derivatives.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from attention_jax._core.numerics import is_concrete, stats_dtype
from attention_jax.kernels import (
    blockwise,
    cudnn,
    dense,
    flash,
    short,
    single_query,
    splash,
)
from attention_jax.kernels.problem import whole_blocks
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import tiling
from attention_jax.masks.block_map import PARTIAL, SKIPPED


class Kernel(Protocol):
    """A kernel module."""

    def why_not(self, request: Request) -> str | None:
        """What of the request it cannot do, or None."""
        ...

    def run(self, request: Request) -> Result:
        """Does it."""
        ...


KERNELS: Mapping[str, Any] = MappingProxyType(
    {
        "dense": dense,
        "blockwise": blockwise,
        "flash": flash,
        "short": short,
        "single_query": single_query,
        "cudnn": cudnn,
        "splash": splash,
    }
)
WHOLE_PLANE = frozenset({"dense", "short", "single_query"})  # all pairs of all heads in one block
# Each runs on one platform alone, where it comes first.
VENDORS: Mapping[str, str] = MappingProxyType({"gpu": "cudnn", "tpu": "splash"})

# Pairs of one head up to which the dense kernel is no slower. Where heads are looped over, the loop
# itself is what costs at short lengths: measured, the two meet near 64 × 64.
_DENSE_PAIRS_LOOPED = 64 * 64
_DENSE_PAIRS = 256 * 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `attend` does with a request.

    Attributes:
        implementation: the kernel that runs.
        reasons: for every candidate passed over, by name, what it could not do, or why another is
            better. Without a named implementation every kernel is a candidate.
        block_size: (query, key) size of a block.
        visited: blocks that are computed, partial ones included, summed over the mask's `planes`;
            None where the mask is traced.
        partial: visited blocks in which the mask is evaluated.
        skipped: blocks that are never touched.
        planes: how many planes [T, S] the mask has and the counts cover: 1 where all examples and
            heads share it.
        flops: of the forward pass's matrix products.
        temporaries: estimated bytes of the largest intermediate arrays, forward.
        derivatives: which transformations have a rule.
    """

    implementation: str
    reasons: Mapping[str, str]
    block_size: tuple[int, int]
    visited: int | None
    partial: int | None
    skipped: int | None
    planes: int
    flops: float
    temporaries: int
    derivatives: tuple[str, ...]

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [f"attention by {self.implementation!r}"]
        size = " × ".join(map(str, self.block_size))
        planes = f" in all {self.planes} planes of the mask" if self.planes > 1 else ""
        if self.visited is None:
            lines.append(f"  blocks      {size}, counted when the mask is known")
        else:
            lines.append(
                f"  blocks      {size}: {self.visited} visited ({self.partial} partial), "
                f"{self.skipped} skipped{planes}"
            )
        lines += [
            f"  products    {_short(self.flops, 1000, ' kMGTP')}FLOP forward",
            f"  temporaries {_short(self.temporaries, 1024, ' KMGTP')}B forward, estimated",
            f"  derivatives {', '.join(self.derivatives)}",
        ]
        lines += [f"  not {name!r}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


def _short(number: float | int, base: int, prefixes: str) -> str:
    """Three digits and a prefix: of 1024, "Ki" and so on."""
    for prefix in prefixes:
        if number < base or prefix == prefixes[-1]:
            break
        number /= base
    binary = "i" if base == 1024 and prefix != " " else ""
    return f"{number:.3g} {prefix.strip()}{binary}"


class Choice(NamedTuple):
    """The chosen kernel's name, and why each candidate before it was passed over."""

    implementation: str
    reasons: dict[str, str]


def check_names(implementation: Any) -> tuple[str, ...]:
    """The kernels that are named, one or several.

    Raises:
        TypeError: neither a name nor a sequence of names.
        ValueError: a name that does not exist, or an empty sequence.
    """
    if not isinstance(implementation, str | list | tuple):
        raise TypeError(
            "implementation must be a name, a sequence of names or None, got "
            f"{type(implementation).__name__}"
        )
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if not names:
        raise ValueError("implementation is an empty sequence; give a name, or None for any")
    for name in names:
        if name not in KERNELS:
            raise ValueError(
                f"implementation must be one of {', '.join(map(repr, KERNELS))}, got {name!r}"
            )
    return names


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """The first candidate that can do the whole request.

    Raises:
        ValueError: a name that does not exist.
        NotImplementedError: none of the named candidates can; the message says why not, for each.
    """
    names = _preferred(request) if implementation is None else check_names(implementation)
    reasons: dict[str, str] = {}
    for name in names:
        reason = KERNELS[name].why_not(request)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    told = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"no implementation can do this request: {told}")


def _preferred(request: Request) -> tuple[str, ...]:
    vendor = VENDORS.get(jax.default_backend())
    if vendor is not None:
        return (vendor, "flash", "dense")
    if _is_small(request):
        return ("single_query", "dense", "flash")
    return ("short", "flash", "dense")


def _is_small(request: Request) -> bool:
    layout = request.layout
    if layout.symbolic_lengths:
        return True
    most = _DENSE_PAIRS_LOOPED if tiling(request).loop else _DENSE_PAIRS
    return layout.T * layout.S <= most and request.block_size is None


def _why_others(request: Request, chosen: Choice) -> dict[str, str]:
    """For every kernel but the chosen one: what it cannot do, or why it was not preferred."""
    reasons = {}
    for name, kernel in KERNELS.items():
        if name != chosen.implementation:
            unable = chosen.reasons.get(name) or kernel.why_not(request)
            reasons[name] = unable or _why_worse(name, chosen.implementation, request)
    return reasons


def _why_worse(name: str, chosen: str, request: Request) -> str:
    """Why the plan prefers `chosen` to a kernel that could compute the request, too."""
    pairs = f"{request.layout.T} × {request.layout.S} pairs"
    if chosen in VENDORS.values():
        why = f"{chosen!r} is this device's own kernel"
    elif chosen == "single_query":
        why = f"{chosen!r} does not copy keys and values"
    elif chosen == "short":
        why = f"{chosen!r} is one fused computation for {pairs}"
    elif chosen == "dense":
        why = f"so few as {pairs} are faster in one block without recomputation"
    elif name == "blockwise":
        why = f"{chosen!r} does the same and its gradient is faster"
    else:
        why = f"{chosen!r} is faster for {pairs} and never holds them all"
    return f"it could, but {why}"


def make_plan(request: Request, implementation: str | Sequence[str] | None) -> Plan:
    """The choice, and what can be counted without running it."""
    choice = choose(request, implementation)
    name = choice.implementation
    reasons = _why_others(request, choice) if implementation is None else choice.reasons
    layout = request.layout
    block, loop = tiling(request)
    if whole := name in WHOLE_PLANE:
        block, loop = (max(layout.T, 1), max(layout.S, 1)), False
    elif name in VENDORS.values():
        loop = True  # nothing of a block's size leaves the chip
    kinds = _kinds(request, block)
    known = isinstance(kinds, np.ndarray)
    area = layout.T * layout.S if whole else block[0] * block[1]
    heads = int(np.prod((*layout.batch, layout.N), dtype=np.int64))
    share = float((kinds != SKIPPED).mean()) if known and kinds.size else 1.0
    pairs = heads * layout.T * layout.S * share
    item = stats_dtype(request.query.dtype, request.key.dtype).itemsize
    return Plan(
        implementation=name,
        reasons=MappingProxyType(reasons),
        block_size=block,
        visited=int((kinds != SKIPPED).sum()) if known else None,
        partial=int((kinds == PARTIAL).sum()) if known else None,
        skipped=int((kinds == SKIPPED).sum()) if known else None,
        planes=int(np.prod(kinds.shape[:-2], dtype=np.int64)),
        flops=2.0 * pairs * (layout.H + layout.V),
        temporaries=int(item * (2 * area * (1 if loop else heads) + heads * layout.T * layout.V)),
        derivatives=KERNELS[name].DERIVATIVES,
    )


def _kinds(request: Request, block: tuple[int, int]) -> Any:
    layout = request.layout
    hides = request.score.may_hide or (request.bias is not None and request.bias.may_hide)
    most = whole_blocks(layout, block, may_hide=hides)
    if request.mask is None or not most.size:
        return most
    kinds = request.mask.block_map(
        layout.T,
        layout.S,
        block,
        query_positions=request.query_positions,
        key_positions=request.key_positions,
    ).kinds
    if not is_concrete(kinds):
        return kinds
    kinds = np.asarray(kinds)
    return np.minimum(kinds, most.reshape((1,) * (kinds.ndim - 2) + most.shape))
