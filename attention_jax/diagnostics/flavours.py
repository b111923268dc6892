"""Running a model of any kind before an observer, and finding what was observed by module path."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from attention_jax._core.observe import observed_by, owned_by, owner
from attention_jax.diagnostics.harvest import Found, harvest, observe

_PATH = "attention_jax_path"

# (request, run, implementation, class of the module) -> (result, values to record)
Look = Callable[[Any, Callable[[Any], Any], Any, str], tuple[Any, Any]]


class Watch:
    """An observer that keeps what `look` returns, with the module whose attention it was."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def __call__(self, request: Any, run: Callable[[Any], Any], implementation: Any) -> Any:
        """One call of attention, looked at."""
        module: Any = owner()
        kind = "attend" if module is None else type(module).__name__
        result, kept = self.look(request, run, implementation, kind)
        return result._replace(out=observe(result.out, kept, _path_of(module), kind))


def _path_of(module: Any) -> str:
    if is_linen(module):
        return "/".join(module.path)
    return getattr(module, _PATH, "")


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
        if variables is None and model.scope is not None:
            model, variables = model.unbind()
        if variables is None:
            raise ValueError("a Linen module keeps no arrays: give variables=, or bind it")
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


def run(
    model: Model,
    watch: Watch | None,
    method: str | None,
    args: Any,
    options: Any,
    gates: Mapping[int, Any] | None = None,
) -> tuple[Any, dict[str, Found]]:
    """The model's output, and what was observed, by name and in the order it ran.

    Args:
        model: the model.
        watch: who looks on; None for nobody.
        method: as in `capture`; and so are the others.
        args: as in `capture`.
        options: as in `capture`.
        gates: by place in that order, what an attention's output `[*B, T, N, V]` is multiplied
            with.
    """
    runner = {"nnx": _run_nnx, "linen": _run_linen, "function": _run_function}[model.flavour]
    if watch is None:
        return runner(model, method, args, options), {}

    leaves, structure = jax.tree.flatten((*model[2:], args, options))

    def observed(arrays: list[Any]) -> Any:
        fresh = iter(arrays)
        whole = [next(fresh) if hasattr(x, "dtype") else x for x in leaves]
        parameters, rest, args, options = jax.tree.unflatten(structure, whole)
        with observed_by(watch), _naming_linen():
            return runner(Model(*model[:2], parameters, rest), method, args, options)

    output, found = harvest(observed, [x for x in leaves if hasattr(x, "dtype")], gates=gates)
    # a model that is itself an attention has no path: its class is its name
    names = [x.tag.path or x.tag.kind for x in found]
    seen: dict[str, int] = {}
    named = {}
    for name, x in zip(names, found, strict=True):
        seen[name] = seen.get(name, -1) + 1
        named[name if names.count(name) == 1 else f"{name}#{seen[name]}"] = x
    return output, named


def _run_function(model: Model, method: str | None, args: Any, options: Any) -> Any:
    if method is not None:
        raise ValueError("method is for modules: a function has none")
    return model.graph(*args, **options)


def _run_nnx(model: Model, method: str | None, args: Any, options: Any) -> Any:
    from flax import nnx

    module = nnx.merge(model.graph, model.parameters, model.rest)
    for path, part in nnx.iter_graph(module):
        if is_nnx(part) and callable(part):  # static, so it goes through any transformation
            setattr(part, _PATH, "/".join(map(str, path)))
        # Flax's own attention: its attention_fn does not know whose it is
        if is_nnx(part) and callable(getattr(part, "attention_fn", None)):
            part.attention_fn = _with_owner(part, part.attention_fn)
    return (module if method is None else getattr(module, method))(*args, **options)


def _with_owner(module: Any, function: Any) -> Any:
    def owned(*args: Any, **options: Any) -> Any:
        with owned_by(module):
            return function(*args, **options)

    return owned


def _run_linen(model: Model, method: str | None, args: Any, options: Any) -> Any:
    variables = {**model.rest, "params": model.parameters}
    output, _ = model.graph.apply(
        variables, *args, **options, method=method, mutable=list(model.rest)
    )
    return output


def _naming_linen() -> Any:
    """Inside, calls of attention belong to the Linen module that runs; functions have some too."""
    if sys.modules.get("flax.linen") is None:
        return contextlib.nullcontext()
    from flax import linen

    def whose(call: Any, args: Any, options: Any, context: Any) -> Any:
        with owned_by(context.module):
            return call(*args, **options)

    return linen.intercept_methods(whose)


def parameters_by_path(model: Model, tree: Any) -> dict[str, Any]:
    """Arrays in the place of the model's parameters, by path."""
    if model.flavour == "nnx":
        from flax import nnx

        flat = nnx.to_flat_state(tree)
        return {"/".join(map(str, path)): part.get_value() for path, part in flat}
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}
