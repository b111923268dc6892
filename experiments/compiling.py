"""Compiling in less time, for programs that run minutes, not days."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

# On the two cores these halve the time to compile a training step of a small Transformer and leave
# its speed as it is: that goes to matrix products, which LLVM does not compile.
_LEVEL = "xla_backend_optimization_level"
_WANTED: tuple[tuple[str, Any], ...] = (
    (_LEVEL, 1),
    ("xla_llvm_disable_expensive_passes", True),
    ("xla_cpu_use_fusion_emitters", False),
)


@functools.cache
def compiler_options(*, runs_little: bool = False) -> dict[str, Any]:
    """Return XLA's options for quick compiling on a CPU, those of them that this version knows.

    Elsewhere there are none, nor where XLA_FLAGS has its own. The cost study does not use them:
    what it times is what users get.

    Args:
        runs_little: the function runs so few times that compiling is most of its cost: compile it
            in half the time again, to run at half the speed.
    """
    if jax.default_backend() != "cpu":
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    options = {n: value for n, value in _WANTED if n not in given and _known(n, value)}
    if runs_little and _LEVEL in options:
        options[_LEVEL] = 0
    return options


def _known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def shapes_of(arguments: Any) -> str:
    """Return the shapes of all arrays in ``arguments``, as words: what an executable is for."""
    return " ".join("×".join(map(str, np.shape(a))) or "·" for a in jax.tree.leaves(arguments))


class Executables:
    """Compiled functions by name, structure and shapes; each is compiled once, whoever asks.

    Models that differ in their seed alone have one structure, so they share theirs.
    """

    def __init__(self) -> None:
        self._futures: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: Any, jitted: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """Return the executable of ``jitted()`` for ``arguments``, compiling it if it is the first.

        Args:
            key: what tells the function from others; shapes are added to it.
            jitted: makes the jitted function.
            arguments: arrays, or anything with shape and dtype.
        """
        key = key, shapes_of(arguments)
        with self._lock:
            first = key not in self._futures
            future = self._futures.setdefault(key, Future())
        if first:
            try:
                future.set_result(jitted().lower(*arguments).compile())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


def all_at_once(work: Sequence[Callable[[], Any]]) -> None:
    """Do some compiling on as many threads as two cores can use, and wait for all of it."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(item) for item in work]:
            future.result()
