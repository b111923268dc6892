"""Collects recorded values from a traced function, inside any transformation.

    out = record(out, values, path, kind)        while the function is traced
    output, found = collect(function, ...)       everything recorded, in order of execution

`record` binds an identity primitive. `collect` traces the function, evaluates the jaxpr equation by
equation, and returns recorded values from inside jit, scan, remat, cond, vmap and derivatives;
values from a scan are stacked. It can also multiply recorded outputs by gates.

References:
    Frostig, Johnson, Leary 2018, "Compiling machine learning programs via high-level tracing".
"""

import contextvars
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from attention_jax._core.axes import Array
from attention_jax._core.pytrees import static

Gates = Mapping[int, Any]

# The structures that a `collect` has recorded. The primitive has their index: JAX's caches keep its
# parameters, and a structure may hold a caller's functions.
_STRUCTURES: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("structures")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collected:
    """The recorded values of one call; their leaves are `[*layers, *mapped, ...]`.

    Attributes:
        values: the recorded pytree.
        path: path of the module, "" for the root module.
        kind: class of the module.
        layers: lengths of the enclosing scans, outermost first.
        mapped: number of enclosing vmaps.
        structure: index of the structure of `values` among those of one `collect`.
    """

    values: Any
    path: str = static()
    kind: str = static()
    layers: tuple[int, ...] = static()
    mapped: int = static()
    structure: int = static()


def record(out: Array, values: Any, path: str, kind: str) -> Array:
    """Records a pytree of values together with an attention output; returns the output."""
    leaves, structure = jax.tree.flatten(values)
    arrays = [jnp.asarray(x) for x in (out, *leaves)]
    structures = _STRUCTURES.get()
    if structure not in structures:
        structures.append(structure)
    index = structures.index(structure)
    return _record.bind(*arrays, path=path, kind=kind, structure=index, mapped=0)[0]


def collect(function: Any, *arguments: Any, gates: Gates) -> tuple[Any, list[Collected]]:
    """Evaluates a function and collects what it records, in order of execution.

    Args:
        function: the function.
        *arguments: pytrees of arrays.
        gates: factors for recorded outputs, by the index of the record; their leading axes are
            those of the enclosing scans.

    Raises:
        NotImplementedError: a record inside an unsupported transformation, such as `while_loop`.
    """
    structures: list[Any] = []
    token = _STRUCTURES.set(structures)
    try:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    finally:
        _STRUCTURES.reset(token)
    outputs, found = _evaluate(closed, jax.tree.leaves(arguments), gates, 0)
    found = [
        dataclasses.replace(x, values=jax.tree.unflatten(structures[x.structure], x.values))
        for x in found
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), found


def _evaluate(
    program: Any, args: Sequence[Any], gates: Gates, number: int
) -> tuple[list[Any], list[Collected]]:
    """Outputs and records of a jaxpr, closed or not; the first record has index `number`."""
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    found: list[Collected] = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        with equation.ctx.manager:
            if _count(equation):
                outputs, new = _enter(equation, inputs, gates, number + len(found))
                found += new
            else:
                outputs = _bind(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], found


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    bound = equation.primitive.get_bind_params(equation.params)
    functions, options = bound if isinstance(bound, tuple) else ((), bound)
    outputs = equation.primitive.bind(*functions, *inputs, **options)
    return outputs if equation.primitive.multiple_results else [outputs]


def _count(equation: Any) -> int:
    """Number of records in an equation."""
    if equation.primitive is _record:
        return 1
    counts = [_count_all(x) for x in jaxprs_in_params(equation.params)]
    return max(counts) if equation.primitive.name == "cond" else sum(counts)  # one branch runs


def _count_all(jaxpr: Any) -> int:
    return sum(map(_count, jaxpr.eqns))


# JAX's names of primitives that evaluate one jaxpr once.
_REMATS = ("checkpoint", "remat", "remat2")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", *_REMATS)


def _enter(
    equation: Any, inputs: list[Any], gates: Gates, number: int
) -> tuple[list[Any], list[Collected]]:
    """Evaluates an equation that contains records."""
    name, params = equation.primitive.name, equation.params
    if equation.primitive is _record:
        out, *leaves = inputs
        if number in gates:
            gate = jnp.asarray(gates[number]).astype(out.dtype)
            out = out * jnp.expand_dims(gate, tuple(range(out.ndim - gate.ndim)))
        path, kind, mapped = params["path"], params["kind"], params["mapped"]
        return [out, *leaves], [Collected(leaves, path, kind, (), mapped, params["structure"])]
    if name == "scan":
        return _scan(params, inputs, gates, number)
    if name == "cond":
        return _switch(params["branches"], inputs, gates, number)
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name not in _CALLS or inner is None:
        raise NotImplementedError(
            f"capture does not support attention inside {name!r}: observe the model without it"
        )
    if name not in _REMATS:
        return _evaluate(inner, inputs, gates, number)
    options = {name: params[name] for name in ("policy", "prevent_cse") if name in params}
    rematerialized = jax.checkpoint(
        lambda inputs, gates: _evaluate(inner, inputs, gates, number), **options
    )
    return rematerialized(inputs, dict(gates))


def _scan(
    params: Mapping[str, Any], inputs: list[Any], gates: Gates, number: int
) -> tuple[list[Any], list[Collected]]:
    inner, (few, carried) = params["jaxpr"], consts_and_carry(params)
    consts, carry, xs = inputs[:few], inputs[few : few + carried], inputs[few + carried :]
    inside = range(number, number + _count_all(inner.jaxpr))
    own = {n: gate for n, gate in gates.items() if n in inside}

    def body(carry: list[Any], parts: Any) -> Any:
        xs, gates = parts
        outputs, found = _evaluate(inner, [*consts, *carry, *xs], gates, number)
        return outputs[:carried], (outputs[carried:], found)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, found) = jax.lax.scan(body, carry, (xs, own), **options)
    layers = params["length"]
    return [*carry, *ys], [dataclasses.replace(x, layers=(layers, *x.layers)) for x in found]


def consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carried operands of a scan."""
    if "ft_in" in params:  # from JAX 0.12 on
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def _switch(
    branches: Sequence[Any], inputs: list[Any], gates: Gates, number: int
) -> tuple[list[Any], list[Collected]]:
    """A `cond` all of whose branches record the same attentions, as with and without dropout."""
    which, *args = inputs
    runs = [lambda *args, inner=inner: _evaluate(inner, args, gates, number) for inner in branches]
    first, *others = (jax.eval_shape(run, *args)[1] for run in runs)
    if any(jax.tree.flatten(x) != jax.tree.flatten(first) for x in others):
        raise NotImplementedError(
            "capture does not support attention that runs in one branch of a 'cond' only, or "
            "differs between branches: observe the model without the condition"
        )
    return jax.lax.switch(which, runs, *args)


_record = Primitive("attention_jax_record")
_record.multiple_results = True
_record.def_impl(lambda *values, **_: list(values))
_record.def_abstract_eval(lambda *values, **_: list(values))
mlir.register_lowering(_record, lambda context, *values, **_: list(values))


def _differentiate(values: Any, tangents: Any, **params: Any) -> Any:
    return _record.bind(*values, **params), list(tangents)


def _batch(values: Any, axes: Any, *, mapped: int, **params: Any) -> Any:
    """Adds the mapped axis in front of every value, broadcast if it has none."""
    size = next(x.shape[a] for x, a in zip(values, axes, strict=True) if a is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, axes, strict=True)
    ]
    return _record.bind(*moved, mapped=mapped + 1, **params), [0] * len(moved)


ad.primitive_jvps[_record] = _differentiate
batching.primitive_batchers[_record] = _batch
