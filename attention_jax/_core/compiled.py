"""Compile the library's functions once, and those that call user code at each call.

`jax.jit` keeps what it traced under the identity of every static argument, and the argument with
it. Where such an argument holds a caller's code, the function is traced at each call, by a jit that
is dropped afterwards. Programs that come out equal share an executable: what costs is the compiler,
and an executable refers to nothing that was traced.
"""

import collections
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import get_opaque_trace_state

from attention_jax._core.numerics import infs_are_errors
from attention_jax._core.user_code import holds_user_code

_MOST_STRUCTURES = 4096
_MOST_EXECUTABLES = 128
_LONGEST_PROGRAM = 2**22  # characters; a longer one holds large constants
_executables: collections.OrderedDict[Any, Any] = collections.OrderedDict()


def compiled(function: Callable[..., Any], *, static: tuple[int, ...] = ()) -> Callable[..., Any]:
    """`function`, compiled as by `jax.jit`; a caller's code in the arguments is traced anew.

    Args:
        function: takes positional arguments only.
        static: which of them are static.
    """
    cached = jax.jit(function, static_argnums=static)
    # Traced apart, because JAX's cache ignores this flag, which some of our functions read.
    without_infs = jax.jit(functools.partial(function), static_argnums=static)
    known: set[Any] = set()  # structures and static arguments without user code

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        fixed = tuple(arguments[i] for i in static)
        dynamic = _dynamic(arguments, static)
        key = jax.tree.structure(dynamic), *fixed
        try:
            is_known = key in known
        except TypeError:  # unhashable: no key of a cache
            return _traced_anew(function, arguments, static)
        if not is_known:
            if holds_user_code((dynamic, fixed)):
                return _traced_anew(function, arguments, static)
            if len(known) >= _MOST_STRUCTURES:
                known.clear()
            known.add(key)
        return (without_infs if infs_are_errors() else cached)(*arguments)

    call._cache_size = cached._cache_size  # type: ignore[attr-defined]  # as jax.jit has it
    return call


def _traced_anew(
    function: Callable[..., Any], arguments: tuple[Any, ...], static: tuple[int, ...]
) -> Any:
    leaves, structure = jax.tree.flatten(_dynamic(arguments, static))
    structures: list[Any] = []

    # A function of leaves: the structure need not be hashable, and no executable refers to it.
    def flat(*leaves: Any) -> list[Any]:
        given = jax.tree.unflatten(structure, leaves)
        whole = [x if i in static else given[i] for i, x in enumerate(arguments)]
        out, out_structure = jax.tree.flatten(function(*whole))
        structures.append(out_structure)
        return out

    flat.__name__ = function.__name__
    # Unused leaves remain arguments: equal programs must take equal arguments.
    out = _run(jax.jit(flat, keep_unused=True), leaves)
    return jax.tree.unflatten(structures[-1], out)


def _dynamic(arguments: tuple[Any, ...], static: tuple[int, ...]) -> Sequence[Any]:
    """The arguments with None for those that are static."""
    return (
        arguments if not static else [None if i in static else x for i, x in enumerate(arguments)]
    )


def _run(jitted: Any, leaves: list[Any]) -> list[Any]:
    """`jitted(*leaves)`; an executable is shared outside of any trace, on a single device."""
    if not _is_plain_call(leaves):
        return jitted(*leaves)
    traced = jitted.trace(*leaves)
    lowered = traced.lower()
    text = lowered.as_text()
    start = text.index("@main(")
    signature = text[start : text.index("\n", start)]
    if (
        len(text) > _LONGEST_PROGRAM
        or "callback" in text  # the text of a callback does not name its function
        or f"%arg{len(leaves)}:" in signature  # constants that are arguments
    ):
        return jitted(*leaves)
    kinds = tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
    digest = hashlib.sha256(text.encode()).digest()
    key = digest, kinds, tuple(traced.jaxpr.out_avals), _default_device()
    executable = _executables.pop(key, None) or lowered.compile()
    _executables[key] = executable  # the last is the latest used
    if len(_executables) > _MOST_EXECUTABLES:
        _executables.popitem(last=False)
    return executable(*leaves)


def _default_device() -> Any:
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def _is_plain_call(leaves: list[Any]) -> bool:
    with jax.core.eval_context():
        outermost = get_opaque_trace_state(convention="flax")
    return (
        get_opaque_trace_state(convention="flax") == outermost
        and all(map(_is_on_one_device, leaves))
        and jax.sharding.get_abstract_mesh().empty
        and not any(getattr(jax.config, name) for name in _CHECKING)
    )


# Modes in which `jax.jit` does more than run an executable.
_CHECKING = ("jax_disable_jit", "jax_debug_nans", "jax_debug_infs")


def _is_on_one_device(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1
