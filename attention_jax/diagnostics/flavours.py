"""Running a model of any kind before an observer, and finding what was observed by module path.

A module keeps what was observed of it as Flax keeps intermediates, so that it comes out of whatever
transformation the module is in; a plain function's calls are kept in the order they come.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from attention_jax._core.observe import observed_by, owned_by, owner

_NAME = "attention_jax_observed"
_HELD = "attention_jax_held"

# request, run, order of the call -> result and what to keep
Look = Callable[[Any, Callable[[Any], Any], str, int], tuple[Any, Any]]


class Watch:
    """An observer that keeps what `look` returns, with the module whose attention it was."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.calls = 0
        self.loose: list[Any] = []

    def __call__(self, request: Any, run: Callable[[Any], Any]) -> Any:
        """One call of attention, looked at."""
        module: Any = owner()
        kind = _class(module)
        result, kept = self.look(request, run, kind, self.calls)
        self.calls += 1
        if is_nnx(module):
            before = getattr(module, _NAME, None)
            parts = () if before is None else before.get_value()
            setattr(module, _NAME, _intermediate()((*parts, kept)))
        elif is_linen(module):
            module.sow(_NAME, _NAME, kept)
        else:
            self.loose.append(kept)
        return result


def _class(module: Any) -> str:
    return "attend" if module is None else type(module).__name__


class Model(NamedTuple):
    """A model taken apart: what is static about it, hashable, and its arrays.

    Attributes:
        flavour: "nnx", "linen" or "function".
        graph: what is static.
        parameters: the arrays that train.
        rest: all others.
    """

    flavour: str
    graph: Any
    parameters: Any
    rest: Any


def is_nnx(model: Any) -> bool:
    """Whether it is a Flax NNX module."""
    nnx = sys.modules.get("flax.nnx")  # whoever has a module has imported it
    return nnx is not None and isinstance(model, nnx.Module)


def is_linen(model: Any) -> bool:
    """Whether it is a Flax Linen module."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def take_apart(model: Any, variables: Any) -> Model:
    """The model as data.

    Raises:
        TypeError: it is nothing that can be called.
        ValueError: a Linen module without variables, or variables for what has its own.
    """
    if is_linen(model):
        if variables is None:
            raise ValueError("a Linen module keeps no arrays: give variables=")
        rest = {name: part for name, part in variables.items() if name != "params"}
        return Model("linen", model, variables.get("params", {}), rest)
    if variables is not None:
        raise ValueError(f"variables are for Linen modules, not for {type(model).__name__}")
    if is_nnx(model):
        from flax import nnx

        return Model("nnx", *nnx.split(model, nnx.Param, ...))
    if not callable(model):
        raise TypeError(f"model must be a Flax module or a function, got {type(model).__name__}")
    return Model("function", model, None, None)


def with_held(model: Model, held: Mapping[str, Any]) -> Model:
    """The model, some of whose modules hold an array more, by path.

    Being a variable, the array is cut where the module's layers are scanned, as its parameters are.
    """
    if not held:
        return model
    if model.flavour == "linen":
        tree: dict[str, Any] = {}
        for path, array in held.items():
            place = tree
            for step in path.split("/"):
                place = place.setdefault(step, {})
            place[_HELD] = array
        return model._replace(rest={**model.rest, _HELD: tree})
    from flax import nnx

    module = nnx.merge(model.graph, model.parameters, model.rest)
    for path, array in held.items():
        part: Any = module
        for step in path.split("/"):
            part = part[int(step)] if step.isdigit() else getattr(part, step)
        setattr(part, _HELD, nnx.Variable(array))
    return Model("nnx", *nnx.split(module, nnx.Param, ...))


def held() -> Any:
    """The array that the module whose attention runs was given to hold, or None."""
    module: Any = owner()
    if is_nnx(module):
        variable = getattr(module, _HELD, None)
        return None if variable is None else variable.get_value()
    if is_linen(module) and module.has_variable(_HELD, _HELD):
        return module.get_variable(_HELD, _HELD)
    return None


def run(
    model: Model, watch: Watch | None, method: str | None, args: Any, options: Any
) -> tuple[Any, dict[str, Any]]:
    """The model's output, and what was observed, by path and in the order it ran."""
    runner = {"nnx": _run_nnx, "linen": _run_linen, "function": _run_function}[model.flavour]
    if watch is None:
        return runner(model, method, args, options)[0], {}
    with observed_by(watch):
        output, found = runner(model, method, args, options)
    kept = [(path, part) for path, parts in found for part in parts]
    kept += [("attend", part) for part in watch.loose]
    counts: dict[str, int] = {}
    for path, _ in kept:
        counts[path] = counts.get(path, 0) + 1
    seen: dict[str, int] = {}
    named = {}
    for path, part in kept:
        seen[path] = seen.get(path, -1) + 1
        named[path if counts[path] == 1 else f"{path}#{seen[path]}"] = part
    return output, named


def _run_function(model: Model, method: str | None, args: Any, options: Any) -> Any:
    if method is not None:
        raise ValueError("method is for modules: a function has none")
    return model.graph(*args, **options), []


def _run_nnx(model: Model, method: str | None, args: Any, options: Any) -> Any:
    from flax import nnx

    module = nnx.merge(model.graph, model.parameters, model.rest)
    for _, part in nnx.iter_graph(module):
        # Flax's own attention: its attention_fn does not know whose it is
        if is_nnx(part) and callable(getattr(part, "attention_fn", None)):
            part.attention_fn = _with_owner(part, part.attention_fn)
    output = (module if method is None else getattr(module, method))(*args, **options)
    state = nnx.to_flat_state(nnx.pop(module, _intermediate()))
    return output, [("/".join(map(str, path[:-1])), part.get_value()) for path, part in state]


def _with_owner(module: Any, function: Any) -> Any:
    def owned(*args: Any, **options: Any) -> Any:
        with owned_by(module):
            return function(*args, **options)

    return owned


def _intermediate() -> Any:
    from flax import nnx

    return nnx.Intermediate


def _run_linen(model: Model, method: str | None, args: Any, options: Any) -> Any:
    from flax import linen

    variables = {**model.rest, "params": model.parameters}

    def whose(call: Any, args: Any, options: Any, context: Any) -> Any:
        with owned_by(context.module):
            return call(*args, **options)

    with linen.intercept_methods(whose):
        output, changed = model.graph.apply(
            variables, *args, **options, method=method, mutable=[*model.rest, _NAME]
        )
    return output, list(_leaves(changed.get(_NAME, {}), ()))


def _leaves(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name, part in tree.items():
        if name == _NAME:
            yield "/".join(path), part
        else:
            yield from _leaves(part, (*path, name))


def parameters_by_path(model: Model, tree: Any) -> dict[str, Any]:
    """Arrays in the place of the model's parameters, by path."""
    if model.flavour == "nnx":
        from flax import nnx

        flat = nnx.to_flat_state(tree)
        return {"/".join(map(str, path)): part.get_value() for path, part in flat}
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}
