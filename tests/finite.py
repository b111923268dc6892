"""Where a function makes a NaN or an infinity: its jaxpr, evaluated operation by operation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from attention_jax.diagnostics.collect import consts_and_carry


def made_of_finite(function: Callable[..., Any], *args: Any) -> list[str]:
    """The operations of `function(*args)` that make a NaN, or an infinity of finite numbers.

    A constant -inf that is selected, such as a masked logit, is not made by an operation.
    """
    found: dict[str, None] = {}
    closed = jax.make_jaxpr(function)(*args)
    _run(closed, jax.tree.leaves(args), found)
    return list(found)


def _run(closed: Any, args: list[Any], found: dict[str, None]) -> list[Any]:
    jaxpr, consts = (closed.jaxpr, closed.consts) if hasattr(closed, "consts") else (closed, ())
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        given = [v.val if isinstance(v, core.Literal) else env[v] for v in eqn.invars]
        outs = _apply(eqn, given, found)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [v.val if isinstance(v, core.Literal) else env[v] for v in jaxpr.outvars]


def _apply(eqn: Any, given: list[Any], found: dict[str, None]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        index = min(max(int(given[0]), 0), len(params["branches"]) - 1)
        return _run(params["branches"][index], given[1:], found)
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        test, body, state = given[:first], given[first:second], given[second:]
        while bool(_run(params["cond_jaxpr"], [*test, *state], found)[0]):
            state = _run(params["body_jaxpr"], [*body, *state], found)
        return state
    if name == "scan":
        return _scan(params, given, found)
    for inner in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if inner in params and hasattr(params[inner], "eqns"):
            return _run(params[inner], given, found)
    out = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(params))
    outs = out if eqn.primitive.multiple_results else [out]
    if not all(map(_is_finite, outs)) and all(map(_is_finite, given)):
        kind = "NaN" if any(np.isnan(_numbers(x)).any() for x in outs) else "an infinity"
        found[f"{name} makes {kind}"] = None
    return outs


def _scan(params: Any, given: list[Any], found: dict[str, None]) -> list[Any]:
    first, carried = consts_and_carry(params)
    consts, state, xs = given[:first], given[first : first + carried], given[first + carried :]
    each = []
    steps = range(params["length"])
    for i in reversed(steps) if params["reverse"] else steps:
        out = _run(params["jaxpr"], [*consts, *state, *(x[i] for x in xs)], found)
        state, part = out[:carried], out[carried:]
        each.append(part)
    if params["reverse"]:
        each.reverse()
    return [*state, *(jnp.stack(column) for column in zip(*each, strict=True))]


def _numbers(x: Any) -> np.ndarray:
    """Its values, in float64; zeros where it has none."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return np.zeros(())
    return np.asarray(x).astype(np.float64)


def _is_finite(x: Any) -> bool:
    return bool(np.isfinite(_numbers(x)).all())
