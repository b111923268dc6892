"""The plan of a call: which kernel runs, why, and how it divides the plane.

`attend` runs the plan of `make_plan`. `explained` adds to the same plan why no other kernel runs.
The counts of blocks, FLOPs and bytes are derived from it without running anything.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from attention_jax._core.axes import Layout
from attention_jax._core.numerics import is_concrete
from attention_jax.kernels import (
    blockwise,
    cudnn,
    dense,
    flash,
    short,
    single_query,
    splash,
)
from attention_jax.kernels import tiling as tilings
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling, without_mask
from attention_jax.masks.block_map import FULL, PARTIAL, SKIPPED


class Kernel(Protocol):
    """A kernel module."""

    DERIVATIVES: tuple[str, ...]

    def why_not(self, request: Request) -> str | None:
        """Why it cannot run the request, or None."""
        ...

    def tile(self, request: Request) -> Tiling | None:
        """How it divides the plane, or None."""
        ...

    def run(self, request: Request, tiling: Any) -> Result:
        """Computes the request."""
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
# Each runs on one platform only, where it is preferred.
VENDORS: Mapping[str, str] = MappingProxyType({"gpu": "cudnn", "tpu": "splash"})

# Pairs of one head up to which the dense kernel is no slower with vectorised heads. With a loop
# over heads the two meet near 64 × 64, because the loop itself costs more than the arithmetic.
_DENSE_PAIRS = 256 * 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of a request: the kernel and its tiling.

    Attributes:
        implementation: the kernel that runs.
        reasons: for every candidate that is not used, by name, what it cannot do, or why another is
            better. Without a named implementation every kernel is a candidate.
        tiling: what the kernel receives; None for one block, or one the kernel chooses.
        layout: the sizes.
        kinds: the kinds of blocks of all `planes`, int8 `[..., nT, nS]`; None if they depend on
            data that are not known.
        accumulator: the dtype of statistics and accumulators.
    """

    implementation: str
    reasons: Mapping[str, str]
    tiling: Tiling | None = dataclasses.field(repr=False)
    layout: Layout = dataclasses.field(repr=False)
    kinds: Any = dataclasses.field(repr=False, compare=False)
    accumulator: np.dtype = dataclasses.field(repr=False)

    @property
    def block_size(self) -> tuple[int, int]:
        """(query, key) size of a block."""
        if self.tiling is not None:
            return self.tiling.block
        return max(self.layout.T, 1), max(self.layout.S, 1)

    def _count(self, *kinds: int) -> int | None:
        if not isinstance(self.kinds, np.ndarray):
            return None
        return int(np.isin(self.kinds, kinds).sum())

    @property
    def visited(self) -> int | None:
        """Blocks that are computed, partial ones included; None if the mask is traced.

        Counts are sums over the mask's `planes`.
        """
        return self._count(PARTIAL, FULL)

    @property
    def partial(self) -> int | None:
        """Visited blocks in which the mask is evaluated."""
        return self._count(PARTIAL)

    @property
    def skipped(self) -> int | None:
        """Blocks that are not computed."""
        return self._count(SKIPPED)

    @property
    def planes(self) -> int:
        """The number of planes [T, S] of the mask: 1 if all examples and heads share it."""
        return int(np.prod(self.kinds.shape[:-2], dtype=np.int64)) if self.kinds is not None else 1

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass's matrix products."""
        layout = self.layout
        known = isinstance(self.kinds, np.ndarray) and self.kinds.size
        share = float((self.kinds != SKIPPED).mean()) if known else 1.0
        return 2.0 * self._heads * layout.T * layout.S * share * (layout.H + layout.V)

    @property
    def temporaries(self) -> int:
        """Estimated bytes of the largest intermediate arrays, forward."""
        layout, block = self.layout, self.block_size
        # an accelerator's kernel returns no arrays of a block's size
        loop = self.implementation in VENDORS.values() or (
            self.implementation not in WHOLE_PLANE and self.tiling is not None and self.tiling.loop
        )
        planes = 2 * block[0] * block[1] * (1 if loop else self._heads)
        return int(self.accumulator.itemsize * (planes + self._heads * layout.T * layout.V))

    @property
    def derivatives(self) -> tuple[str, ...]:
        """Transformations with a rule."""
        return KERNELS[self.implementation].DERIVATIVES

    @property
    def _heads(self) -> int:
        return int(np.prod((*self.layout.batch, self.layout.N), dtype=np.int64))

    def __str__(self) -> str:
        """A summary of several lines."""
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
    """The chosen kernel's name, and why each candidate before it is not used."""

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
        if not isinstance(name, str) or name not in KERNELS:
            raise ValueError(
                f"implementation must be one of {', '.join(map(repr, KERNELS))}, got {name!r}"
            )
    return names


def choose(request: Request, implementation: str | Sequence[str] | None) -> Choice:
    """The first candidate that supports the whole request.

    Raises:
        ValueError: a name that does not exist.
        NotImplementedError: no named candidate does; the message has the reason for each.
    """
    names = _preferred(request) if implementation is None else check_names(implementation)
    reasons: dict[str, str] = {}
    for name in names:
        reason = KERNELS[name].why_not(request)
        if reason is None:
            return Choice(name, reasons)
        reasons[name] = reason
    each = "; ".join(f"{name!r}: {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"no implementation can do this request: {each}")


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
    most = tilings.SMALL_PLANE if tilings.on_one_cpu() else _DENSE_PAIRS
    return layout.T * layout.S <= most and request.block_size is None


def _why_others(request: Request, chosen: Plan) -> dict[str, str]:
    """For every other kernel: why it cannot run the request, or why it is not preferred."""
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
    """The plan that a call follows."""
    name, reasons = choose(request, implementation)
    tiling = KERNELS[name].tile(request)
    known = None if tiling is None or tiling.kinds is None else tiling.kinds.array
    reasons = MappingProxyType(reasons)
    return Plan(name, reasons, tiling, request.layout, known, request.accumulator)


def explained(request: Request, implementation: str | Sequence[str] | None) -> Plan:
    """The same plan, with the reasons of every candidate and kinds of blocks that data decide."""
    plan = make_plan(request, implementation)
    reasons, kinds = plan.reasons, plan.kinds
    if implementation is None:
        reasons = MappingProxyType(_why_others(request, plan))
    if kinds is None:
        kinds = _kinds(request, plan.block_size)
    return dataclasses.replace(plan, reasons=reasons, kinds=kinds)


def _kinds(request: Request, block: tuple[int, int]) -> Any:
    layout = request.layout
    most = without_mask(layout, block, may_hide=request.may_hide)
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
