"""Applies a model, NNX or Linen module or function, and records every call of attention by path."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from attention_jax._core.observers import observed_by, owned_by, owner
from attention_jax.diagnostics.collect import Collected, Gates, collect, record
from attention_jax.kernels.request import Request, Result

_PATH = "attention_jax_path"


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        request: the checked arguments.
        run: `run(request)` is the result without an observer.
        implementation: the argument of `attend`.
        kind: class of the module, or "attend" outside of modules.
    """

    request: Request
    run: Callable[[Request], Result]
    implementation: Any
    kind: str


# call -> (result, values to record)
Recorder = Callable[[Call], tuple[Result, Any]]


class _Static(NamedTuple):
    """The static part of an application; hashable if its leaves are."""

    flavour: str
    graph: Any
    method: str | None
    structure: Any
    leaves: tuple[Any, ...]


class Application(NamedTuple):
    """A model, split into static graph and arrays, and the arguments of a call.

    Attributes:
        flavour: "nnx", "linen" or "function".
        graph: the static part of the model.
        parameters: trainable arrays.
        rest: all other arrays.
        method: name of the method, None for `__call__`.
        args: positional arguments.
        options: keyword arguments.
    """

    flavour: str
    graph: Any
    parameters: Any
    rest: Any
    method: str | None
    args: Any
    options: Any

    def run(
        self, recorder: Recorder | None = None, gates: Gates | None = None
    ) -> tuple[Any, dict[str, Collected]]:
        """The model's output, and the records of its attentions by name, in order of execution.

        Args:
            recorder: called with every `Call`; None records nothing.
            gates: factors for attention outputs `[*B, T, N, V]`, by index in that order.
        """
        if recorder is None:
            return _RUN[self.flavour](self), {}
        arrays, static = split(self)

        def observer(request: Request, run: Any, implementation: Any) -> Result:
            module = owner()
            kind = "attend" if module is None else type(module).__name__
            result, values = recorder(Call(request, run, implementation, kind))
            return result._replace(out=record(result.out, values, _path_of(module), kind))

        def observed(arrays: list[Any]) -> Any:
            with observed_by(observer), _linen_modules_as_owners():
                return _RUN[self.flavour](join(arrays, static))

        output, found = collect(observed, arrays, gates=gates or {})
        # a model that is itself an attention has an empty path and is named by its class
        names = [x.path or x.kind for x in found]
        counts: dict[str, int] = {}
        named = {}
        for name, x in zip(names, found, strict=True):
            counts[name] = counts.get(name, -1) + 1
            named[name if names.count(name) == 1 else f"{name}#{counts[name]}"] = x
        return output, named

    def by_path(self, tree: Any) -> dict[str, Any]:
        """Arrays in the structure of `parameters`, by path."""
        if self.flavour == "nnx":
            from flax import nnx

            flat = nnx.to_flat_state(tree)
            return {"/".join(map(str, path)): part.get_value() for path, part in flat}
        return flatten_by_path(tree)


def prepare(model: Any, variables: Any, method: str | None, args: Any, options: Any) -> Application:
    """The application of a model to arguments.

    Raises:
        TypeError: the model is neither a Flax module nor callable.
        ValueError: a Linen module without variables, or variables for another model.
    """
    call = {"method": method, "args": args, "options": options}
    if is_linen(model):
        if variables is None and model.scope is not None:
            model, variables = model.unbind()
        if variables is None:
            raise ValueError("a Linen module holds no arrays: pass variables=, or bind it")
        rest = {name: part for name, part in variables.items() if name != "params"}
        # A clone: a compiled application keeps its static part.
        return Application("linen", model.clone(), variables.get("params", {}), rest, **call)
    if variables is not None:
        raise ValueError(f"variables are for Linen modules, not for {type(model).__name__}")
    if is_nnx(model):
        from flax import nnx

        graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        return Application("nnx", graph, parameters, rest, **call)
    if not callable(model):
        raise TypeError(f"model must be a Flax module or a function, got {type(model).__name__}")
    if method is not None:
        raise ValueError("method is for modules: a function has none")
    return Application("function", model, None, None, **call)


def split(application: Application) -> tuple[list[Any], _Static]:
    """The arrays of an application, and its static part."""
    x = application
    leaves, structure = jax.tree.flatten((x.parameters, x.rest, x.args, x.options))
    static = tuple(None if hasattr(leaf, "dtype") else leaf for leaf in leaves)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    return arrays, _Static(x.flavour, x.graph, x.method, structure, static)


def join(arrays: list[Any], static: _Static) -> Application:
    """The inverse of `split`."""
    rest = iter(arrays)
    leaves = [next(rest) if leaf is None else leaf for leaf in static.leaves]
    parameters, other, args, options = jax.tree.unflatten(static.structure, leaves)
    flavour, graph, method = static[:3]
    return Application(flavour, graph, parameters, other, method, args, options)


def is_nnx(model: Any) -> bool:
    """Whether `model` is a Flax NNX module; does not import Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def is_linen(model: Any) -> bool:
    """Whether `model` is a Flax Linen module; does not import Flax."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(model, linen.Module)


def flatten_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, with slashes."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in flat}


def _path_of(module: Any) -> str:
    return "/".join(module.path) if is_linen(module) else getattr(module, _PATH, "")


def _run_function(x: Application) -> Any:
    return x.graph(*x.args, **x.options)


def _run_nnx(x: Application) -> Any:
    from flax import nnx

    module = nnx.merge(x.graph, x.parameters, x.rest)
    for path, part in nnx.iter_graph(module):
        if is_nnx(part) and callable(part):  # a static attribute survives Flax's transformations
            setattr(part, _PATH, "/".join(map(str, path)))
        # Flax's attention modules call their attention_fn without a reference to themselves
        if is_nnx(part) and callable(getattr(part, "attention_fn", None)):
            part.attention_fn = _owned(part, part.attention_fn)
    function = module if x.method is None else getattr(module, x.method)
    return function(*x.args, **x.options)


def _owned(module: Any, function: Any) -> Any:
    def owned(*args: Any, **options: Any) -> Any:
        with owned_by(module):
            return function(*args, **options)

    return owned


def _run_linen(x: Application) -> Any:
    variables = {**x.rest, "params": x.parameters}
    options = {**x.options, "method": x.method, "mutable": list(x.rest)}
    return x.graph.apply(variables, *x.args, **options)[0]


def _linen_modules_as_owners() -> Any:
    """Context in which calls of attention belong to the Linen module whose method runs."""
    if sys.modules.get("flax.linen") is None:
        return contextlib.nullcontext()
    from flax import linen

    def own(call: Any, args: Any, options: Any, context: Any) -> Any:
        with owned_by(context.module):
            return call(*args, **options)

    return linen.intercept_methods(own)


_RUN = {"nnx": _run_nnx, "linen": _run_linen, "function": _run_function}
