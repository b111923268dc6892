"""Adapts functions of a model, written once, to each flavour."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from attention_jax.layers import docstrings

Out = TypeVar("Out")


def for_flavour(
    function: Callable[..., Out], make: Callable[..., Any], extra: str = "", base: Any = None
) -> Callable[..., Out]:
    """A flavour's version of a function whose first argument represents a model of any flavour.

    Args:
        function: The function.
        make: Makes its first argument; the parameters of `make` replace it.
        extra: A docstring with the flavour's additions.
        base: A function whose docstring describes the shared arguments.
    """
    known = docstrings.arguments((base or function).__doc__)
    own = inspect.signature(make).parameters
    original = inspect.signature(function)
    _, *others = original.parameters.values()
    signature = original.replace(parameters=[*own.values(), *others])

    def run(*args: Any, **options: Any) -> Out:
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        model = make(*(given.pop(name) for name in own))
        return function(model, **given)

    run.__name__ = run.__qualname__ = function.__name__
    run.__module__ = make.__module__
    run.__doc__ = docstrings.completed(function.__doc__, signature.parameters, known, extra)
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run
