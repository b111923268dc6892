"""A contest: several implementations of one computation, timed in interleaved rounds.

    ratio = median time of one / median time of another, from the same interleaved rounds

A contestant is prepared once for each pass: compiled (its time and its temporaries are kept) and
bound to its arguments. The passes are "forward" and "gradient" (forward and backward).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.core.measure import compile_for

Arguments = Callable[[], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A contestant, ready to run.

    Attributes:
        call: runs it once and returns the result, to block on.
        temporaries: bytes besides arguments and results; None if unknown.
        compile_seconds: time to trace and compile; None where nothing is compiled.
    """

    call: Callable[[], Any]
    temporaries: int | None = None
    compile_seconds: float | None = None


Contestant = Callable[[str], Prepared]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """What a case compares, and how much of it there may be.

    Attributes:
        of: the contestant in the numerator.
        to: the contestant in the denominator.
        at_most: the target by pass; a pass without an entry is only reported.
        quantity: "time", "temporaries" or "compile".
    """

    of: str
    to: str
    at_most: dict[str, float] = dataclasses.field(default_factory=dict)
    quantity: str = "time"


@dataclasses.dataclass(frozen=True)
class Limit:
    """A bound on a contestant by itself: bytes of temporaries, or seconds to compile.

    Attributes:
        of: the contestant.
        which: the pass.
        quantity: "temporaries" (bytes) or "compile" (seconds).
        at_most: the limit.
    """

    of: str
    which: str
    quantity: str
    at_most: float


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: a short name, unique in the table.
        title: what is computed, with its sizes.
        contestants: by name.
        ratios: the ratios of contestants.
        limits: the limits of single contestants.
        passes: the passes that are measured.
        run: False to compile only, for sizes whose memory is the question.
        sized: the smallest preset that includes it, "quick", "default" or "full".
    """

    name: str
    title: str
    contestants: dict[str, Contestant]
    ratios: Sequence[Ratio] = ()
    limits: Sequence[Limit] = ()
    passes: Sequence[str] = ("forward", "gradient")
    run: bool = True
    sized: str = "default"


def compiled(function: Callable[..., Any], arguments: Arguments) -> Contestant:
    """A JAX function of arrays; its gradient is taken with respect to every floating argument."""

    def prepare(which: str) -> Prepared:
        given = arguments()
        executable = compile_for(function if which == "forward" else gradient(function), given)
        return Prepared(
            lambda: executable.call(*given), executable.temporaries, executable.compile_seconds
        )

    return prepare


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of ½ Σ out² for all floating arguments, so that no gradient is a constant."""

    def grads(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        moves = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]

        def loss(moving: list[Any]) -> Any:
            rest = iter(moving)
            chosen = [next(rest) if flag else x for flag, x in zip(moves, leaves, strict=True)]
            out = function(*jax.tree.unflatten(structure, chosen))
            return 0.5 * jnp.sum(jnp.square(out.astype(jnp.float32)))

        return jax.grad(loss)([x for flag, x in zip(moves, leaves, strict=True) if flag])

    return grads


def normal(seed: int, *shapes: Sequence[int], dtype: Any = np.float32) -> tuple[jax.Array, ...]:
    """Standard normal arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype) for shape in shapes)


def torch_attention(arguments: Arguments, *, causal: bool = False) -> Contestant | None:
    """PyTorch's fused attention on the CPU; None where PyTorch is not installed."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def prepare(which: str) -> Prepared:
        # [B, T, N, H] to [B, N, T, H], its own layout, before the clock starts
        tensors = [
            torch.tensor(np.asarray(x))
            .transpose(1, 2)
            .contiguous()
            .requires_grad_(which != "forward")
            for x in arguments()
        ]
        attention = torch.nn.functional.scaled_dot_product_attention

        def call() -> Any:
            if which == "forward":
                with torch.no_grad():
                    return attention(*tensors, is_causal=causal).shape
            for tensor in tensors:
                tensor.grad = None
            out = attention(*tensors, is_causal=causal)
            out.backward(out.detach())
            return out.shape

        return Prepared(call)

    return prepare
