"""Time and memory of compiled functions: interleaved medians, compile time apart, temporaries."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function compiled for given arguments, not yet run.

    Attributes:
        call: the executable; takes the arguments it was compiled for.
        temporaries: bytes besides arguments and results (None if XLA does not report them).
        compile_seconds: time spent tracing and compiling.
    """

    call: Callable[..., Any]
    temporaries: int | None
    compile_seconds: float


def compile_for(
    function: Callable[..., Any], arguments: Sequence[Any], *, donate: Sequence[int] = ()
) -> Compiled:
    """Compile ``function`` for ``arguments`` (arrays or ShapeDtypeStructs) without running it.

    The arguments in ``donate`` are donated to each call.
    """
    begun = time.perf_counter()
    executable = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    seconds = time.perf_counter() - begun
    analysis = executable.memory_analysis()
    return Compiled(executable, None if analysis is None else analysis.temp_size_in_bytes, seconds)


def interleaved(
    calls: Mapping[str, Callable[[], Any]], *, rounds: int, least_seconds: float = 0.002
) -> dict[str, dict[str, float]]:
    """Time several functions interleaved, ``rounds`` times, so that noise affects all equally.

    Each is run once unmeasured first; short ones are repeated within a round until they take
    ``least_seconds``.

    Returns:
        For each name ``median``, ``low`` and ``high`` over the rounds, in milliseconds a call.
    """
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        once = _time(call, 1)
        repeats[name] = max(1, int(least_seconds / max(once, 1e-6)))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(_time(call, repeats[name]) * 1e3)
    return {
        name: {"median": statistics.median(times), "low": min(times), "high": max(times)}
        for name, times in taken.items()
    }


def crossover(
    lengths: Sequence[int], first: Sequence[float | None], second: Sequence[float | None]
) -> int | None:
    """Return the least length from which on ``first`` always takes longer than ``second``.

    Lengths at which either was not measured are ignored. None if there is no such length.
    """
    both = [
        (n, a > b)
        for n, a, b in zip(lengths, first, second, strict=True)
        if a is not None and b is not None
    ]
    found = None
    for length, slower in both:
        if not slower:
            found = None
        elif found is None:
            found = length
    return found


def _time(call: Callable[[], Any], repeats: int) -> float:
    begun = time.perf_counter()
    for _ in range(repeats):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begun) / repeats


# Peak of matrix products in bfloat16, operations a second, by the start of the device's kind.
_PEAKS = {
    "TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12,
}  # fmt: skip


def speed(executable: Any, seconds: float, tokens: float) -> str:
    """Return tokens a second in words, and the share of the device's peak where that is known.

    Args:
        executable: the compiled step of one device.
        seconds: the time of a step.
        tokens: tokens a second, 0 where they are not counted.
    """
    words = f", {tokens:,.0f} tokens/s" if tokens else ""
    kind = jax.devices()[0].device_kind
    peak = next((value for name, value in _PEAKS.items() if kind.startswith(name)), None)
    if peak and (flops := (executable.cost_analysis() or {}).get("flops")):
        words += f", {flops / seconds / peak:.0%} of peak"
    return words
