"""Compilation of models' functions: each is compiled once, with faster options on a CPU."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from experiments.core import mesh

# On two cores these halve the compile time of a training step of a small Transformer without a
# change in its speed: most of the run time is in matrix products, which LLVM does not compile.
_LEVEL = "xla_backend_optimization_level"
_WANTED: tuple[tuple[str, Any], ...] = (
    (_LEVEL, 1),
    ("xla_llvm_disable_expensive_passes", True),
    ("xla_cpu_use_fusion_emitters", False),
)


@functools.cache
def compiler_options(*, fast_compile: bool = False) -> dict[str, Any]:
    """Return XLA's options for fast compilation on a CPU that this version supports.

    Empty on other devices, and if XLA_FLAGS sets them. The cost study does not use them, because it
    measures the users' setting.

    Args:
        fast_compile: whether the function runs so rarely that compilation dominates: this halves
            the compile time again, at half the speed.
    """
    if jax.default_backend() != "cpu":
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    options = {n: value for n, value in _WANTED if n not in given and _known(n, value)}
    if fast_compile and _LEVEL in options:
        options[_LEVEL] = 0
    return options


def _known(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def shapes_of(arguments: Any) -> str:
    """Return the shapes of all arrays in ``arguments``, as words."""
    return " ".join("×".join(map(str, np.shape(a))) or "·" for a in jax.tree.leaves(arguments))


def _kind(leaf: Any) -> Any:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    return np.shape(leaf), jax.dtypes.result_type(leaf), sharding


_FUTURES: dict[Any, Future[Any]] = {}
_LOCK = threading.Lock()


def executable(key: Any, jitted: Callable[[], Any], arguments: Sequence[Any]) -> Any:
    """Return the executable of ``jitted()`` for ``arguments``, compiled once, thread-safe.

    Args:
        key: everything that the function depends on besides its arguments, hashable: models that
            differ only in their parameters have one key. Structure, shapes, dtypes and shardings of
            the arguments are added to it.
        jitted: makes the jitted function.
        arguments: arrays.
    """
    leaves, structure = jax.tree.flatten(arguments)
    key = key, structure, tuple(map(_kind, leaves))
    with _LOCK:
        first = key not in _FUTURES
        future = _FUTURES.setdefault(key, Future())
    if first:
        try:
            future.set_result(jitted().lower(*arguments).compile())
        except BaseException as error:
            future.set_exception(error)
            raise
    return future.result()


def call(function: Callable[..., Any], model: nnx.Module, *arrays: Any, **options: Any) -> Any:
    """Return ``function(model, *arrays)``, compiled; the model's variables are not changed.

    If the model is on a mesh, so are the arrays, and the result is complete in every process.

    Args:
        function: of a module, so that equal functions are one object.
        model: the model.
        *arrays: trees of arrays.
        **options: as of `prepare`.
    """
    run, arguments = _prepared(function, model, arrays, **options)
    return run(*arguments)


def prepare(function: Callable[..., Any], model: nnx.Module, *arrays: Any, **options: Any) -> None:
    """Compile `call` for arrays of these shapes.

    Args:
        function: as of `call`.
        model: the model.
        *arrays: trees of arrays.
        **options: ``fast_compile``, as of `compiler_options`, True by default; others are static
            arguments of the function.
    """
    _prepared(function, model, arrays, **options)


def _prepared(
    function: Callable[..., Any],
    model: nnx.Module,
    arrays: Sequence[Any],
    *,
    fast_compile: bool = True,
    **static: Any,
) -> tuple[Any, tuple[Any, ...]]:
    graph, state = nnx.split(model)
    where = mesh.of(state)

    def compute(state: Any, *arrays: Any) -> Any:
        return function(nnx.merge(graph, state), *arrays, **static)

    def jitted() -> Any:
        whole = None if where is None else NamedSharding(where, PartitionSpec())
        xla = compiler_options(fast_compile=fast_compile)
        return jax.jit(compute, out_shardings=whole, compiler_options=xla)

    arguments = (state, *(arrays if where is None else mesh.place(where, tuple(arrays))))
    key = function, graph, tuple(sorted(static.items())), fast_compile
    return executable(key, jitted, arguments), arguments


def all_at_once(work: Sequence[Callable[[], Any]]) -> None:
    """Compile in as many threads as two cores can use, and wait for all of them."""
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(item) for item in work]:
            future.result()
