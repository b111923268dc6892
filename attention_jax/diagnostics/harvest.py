"""Bringing what is observed out of whatever transformation it happens in.

    out, kept = observe(out, kept, ...)         while the function is traced
    output, found = harvest(function, ...)      what was kept, in the order it comes

`observe` marks values in the traced program by a primitive that does nothing; `harvest` traces a
function and evaluates the program, carrying marked values out of inner jits, scans, remats, vmaps
and derivatives. Of a scan they come stacked. It may also multiply marked outputs on the way.

References:
    Frostig, Johnson, Leary 2018, "Compiling machine learning programs via high-level tracing" (the
    traced program as data).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive, jaxprs_in_params
from jax.interpreters import ad, batching, mlir

from attention_jax._core.axes import Array


class Tag:
    """What is known of an observation while tracing.

    Attributes:
        path: of the module, "" for the model itself.
        kind: the module's class.
        structure: of what is kept.
    """

    def __init__(self, path: str, kind: str, structure: Any) -> None:
        self.path = path
        self.kind = kind
        self.structure = structure

    def __repr__(self) -> str:
        return f"Tag({self.path!r}, {self.kind!r})"


class Found(NamedTuple):
    """One observation; its leaves `[*layers, *mapped, ...]`.

    Attributes:
        tag: what was known while tracing.
        leaves: of what was kept.
        layers: lengths of the scans around it, outermost first.
        mapped: how many vmaps are around it.
    """

    tag: Tag
    leaves: list[Any]
    layers: tuple[int, ...]
    mapped: int

    @property
    def kept(self) -> Any:
        """What was kept."""
        return jax.tree.unflatten(self.tag.structure, self.leaves)


def observe(out: Array, kept: Any, path: str, kind: str) -> Array:
    """Marks what is kept of an attention with output `out`; returns that."""
    leaves, structure = jax.tree.flatten(kept)
    arrays = [jnp.asarray(x) for x in (out, *leaves)]
    return _observed.bind(*arrays, tag=Tag(path, kind, structure), mapped=0)[0]


def harvest(
    function: Callable[..., Any], *arguments: Any, gates: Mapping[int, Any] | None = None
) -> tuple[Any, list[Found]]:
    """What the function returns, and what was observed in it, in the order it comes.

    Args:
        function: the function.
        *arguments: arrays, and trees of them.
        gates: by the number of an observation, what its output is multiplied with, behind the
            axes of scans around it.

    Raises:
        NotImplementedError: an observation inside a transformation that lets nothing out, such as
            a while loop.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = jax.tree.leaves(arguments)
    outputs, found = _evaluate(closed.jaxpr, closed.consts, leaves, gates or {}, 0)
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), found


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], gates: Mapping[int, Any], number: int
) -> tuple[list[Any], list[Found]]:
    """A program's outputs and observations, the first of which has this number."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    found: list[Found] = []

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        with equation.ctx.manager:
            if not _count(equation):
                outputs = _bind(equation, inputs)
            else:
                outputs, new = _enter(equation, inputs, gates, number + len(found))
                found += new
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars], found


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    bound = equation.primitive.get_bind_params(equation.params)
    functions, options = bound if isinstance(bound, tuple) else ((), bound)
    outputs = equation.primitive.bind(*functions, *inputs, **options)
    return outputs if equation.primitive.multiple_results else [outputs]


def _count(equation: Any) -> int:
    """How many observations an equation holds."""
    if equation.primitive is _observed:
        return 1
    counts = [_count_all(x) for x in jaxprs_in_params(equation.params)]
    return max(counts) if equation.primitive.name == "cond" else sum(counts)  # one branch runs


def _count_all(jaxpr: Any) -> int:
    return sum(map(_count, jaxpr.eqns))


def _enter(
    equation: Any, inputs: list[Any], gates: Mapping[int, Any], number: int
) -> tuple[list[Any], list[Found]]:
    """An equation with observations in it."""
    name, params = equation.primitive.name, equation.params
    if equation.primitive is _observed:
        out, *kept = inputs
        if number in gates:
            gate = jnp.asarray(gates[number]).astype(out.dtype)
            gate = jnp.expand_dims(gate, tuple(range(out.ndim - gate.ndim)))
            out = out * gate
        return [out, *kept], [Found(params["tag"], kept, (), params["mapped"])]
    if name == "scan":
        return _scan(params, inputs, gates, number)
    if name == "cond":
        return _switch(params["branches"], inputs, gates, number)
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if name not in _CALLS or inner is None:
        raise NotImplementedError(
            f"attention inside {name!r}, a transformation that lets nothing observed out: look at "
            "the model without it"
        )
    consts = getattr(inner, "consts", ())
    jaxpr = getattr(inner, "jaxpr", inner)
    if name not in _REMATS:
        return _evaluate(jaxpr, consts, inputs, gates, number)

    def again(inputs: list[Any], gates: Any) -> Any:
        return _packed(*_evaluate(jaxpr, consts, inputs, gates, number), seen)

    seen: list[Found] = []
    options = {name: params[name] for name in ("policy", "prevent_cse") if name in params}
    outputs, leaves = jax.checkpoint(again, **options)(inputs, dict(gates))
    return outputs, _unpacked(seen, leaves)


# As JAX names them: what runs its program once, in place.
_REMATS = ("checkpoint", "remat", "remat2")
_CALLS = (
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *_REMATS,
)


def _packed(outputs: list[Any], found: list[Found], seen: list[Found]) -> Any:
    """Arrays alone, to go through a transformation; what else there is, is put into `seen`."""
    seen[:] = [x._replace(leaves=[]) for x in found]
    return outputs, [x.leaves for x in found]


def _unpacked(seen: list[Found], leaves: list[list[Any]]) -> list[Found]:
    return [x._replace(leaves=own) for x, own in zip(seen, leaves, strict=True)]


def _scan(
    params: Mapping[str, Any], inputs: list[Any], gates: Mapping[int, Any], number: int
) -> tuple[list[Any], list[Found]]:
    inner, (few, carried) = params["jaxpr"], _consts_and_carry(params)
    consts, carry, xs = inputs[:few], inputs[few : few + carried], inputs[few + carried :]
    inside = range(number, number + _count_all(inner.jaxpr))
    own = {n: gate for n, gate in gates.items() if n in inside}
    seen: list[Found] = []

    def body(carry: list[Any], parts: Any) -> Any:
        xs, gates = parts
        args = [*consts, *carry, *xs]
        outputs, found = _evaluate(inner.jaxpr, inner.consts, args, gates, number)
        outputs, leaves = _packed(outputs, found, seen)
        return outputs[:carried], (outputs[carried:], leaves)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, leaves) = jax.lax.scan(body, carry, (xs, own), **options)
    found = _unpacked(seen, leaves)
    return [*carry, *ys], [x._replace(layers=(params["length"], *x.layers)) for x in found]


def _consts_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many its carry."""
    if "ft_in" in params:  # from JAX 0.12 on
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def _switch(
    branches: Sequence[Any], inputs: list[Any], gates: Mapping[int, Any], number: int
) -> tuple[list[Any], list[Found]]:
    """Branches that keep the same of the same attentions, as with dropout and without."""
    which, *args = inputs
    seen: list[list[Found]] = [[] for _ in branches]

    def branch(inner: Any, seen: list[Found]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return _packed(*_evaluate(inner.jaxpr, inner.consts, args, gates, number), seen)

        return run

    runs = [branch(*pair) for pair in zip(branches, seen, strict=True)]
    shapes = [jax.eval_shape(run, *args)[1] for run in runs]
    alike = [
        [(x.tag.path, x.tag.kind, x.tag.structure, x.layers, x.mapped) for x in own] for own in seen
    ]
    if any(x != alike[0] for x in alike) or any(x != shapes[0] for x in shapes):
        raise NotImplementedError(
            "attention in one branch of a 'cond', and not the same in the others: look at the "
            "model without the condition"
        )
    outputs, leaves = jax.lax.switch(which, runs, *args)
    return outputs, _unpacked(seen[0], leaves)


_observed = Primitive("attention_jax_observed")
_observed.multiple_results = True
_observed.def_impl(lambda *values, **_: list(values))
_observed.def_abstract_eval(lambda *values, **_: list(values))
mlir.register_lowering(_observed, lambda context, *values, **_: list(values))


def _derivative(values: Any, tangents: Any, **params: Any) -> Any:
    return _observed.bind(*values, **params), list(tangents)


def _batched(values: Any, axes: Any, *, tag: Tag, mapped: int) -> Any:
    """All get the mapped axis, in front."""
    size = next(x.shape[a] for x, a in zip(values, axes, strict=True) if a is not None)

    def in_front(x: Any, axis: Any) -> Any:
        if axis is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, axis, 0)

    moved = [in_front(x, axis) for x, axis in zip(values, axes, strict=True)]
    return _observed.bind(*moved, tag=tag, mapped=mapped + 1), [0] * len(moved)


ad.primitive_jvps[_observed] = _derivative
batching.primitive_batchers[_observed] = _batched
