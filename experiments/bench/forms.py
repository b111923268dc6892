"""Textbook attention and this library's attention, checked against the float64 reference.

    textbook dot        softmax(q kᵀ / √H) v               keeps [B, N, T, S]
    textbook additive   softmax(v · tanh(q W + k U)) v     keeps [B, N, T, S, A]
    ours                attend(q, k, v, score=...)         the same numbers, block by block

A form is a function of query, key, value and the parameters of an additive score, which those of
the dot product ignore. `check` compares values and gradients with the float64 reference, on sizes
that no block divides.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.testing import reference_attention, reference_gradients
from experiments.bench.contest import gradient, normal
from experiments.bench.exact import additive, textbook_additive

SCORES = ("dot", "additive")
_PARAMS = ("w_query", "w_key", "v")
_TOLERANCE = 2e-5  # relative to the largest entry: float32, sums of some ten terms


def textbook_dot(query: Any, key: Any, value: Any, *params: Any) -> jax.Array:
    """Return softmax(q kᵀ / √H) v, with all weights in memory at once."""
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), value)


def our_dot(query: Any, key: Any, value: Any, *params: Any) -> jax.Array:
    """Return the library's scaled dot-product attention."""
    return aj.attend(query, key, value)


FORMS: dict[str, tuple[str, Callable[..., jax.Array]]] = {
    "textbook dot": ("dot", textbook_dot),
    "our dot": ("dot", our_dot),
    "textbook additive": ("additive", textbook_additive),
    "our additive": ("additive", additive),
}


def picked(score: str, arguments: tuple[Any, ...]) -> str:
    """Return the name of the implementation that the library picks for these arguments."""
    query, key, value, *params = arguments
    chosen = aj.scores.additive(*params) if score == "additive" else aj.scores.scaled_dot()
    return aj.explain(query, key, value, score=chosen).implementation


def inputs(
    seed: int, length: int, *, heads: int, depth: int, hidden: int, keys: int | None = None
) -> tuple[jax.Array, ...]:
    """Return query, key, value ``[1, length, heads, depth]`` ~ N(0, 1) and additive parameters."""
    rows = [(1, n, heads, depth) for n in (length, keys or length, keys or length)]
    *qkv, w_query, w_key, v = normal(seed, *rows, (depth, hidden), (depth, hidden), (hidden,))
    return (*qkv, w_query * depth**-0.5, w_key * depth**-0.5, v * hidden**-0.5)


def check(name: str) -> str | None:
    """Return the error of a form's values or gradients against float64, or None."""
    kind, form = FORMS[name]
    arguments = inputs(7, 19, heads=2, depth=5, hidden=3, keys=23)
    query, key, value, *params = arguments
    used = dict(zip(_PARAMS, params, strict=True)) if kind == "additive" else {}
    score = {"score": "additive" if used else "scaled_dot", "params": used or None}
    out = reference_attention(query, key, value, **score).out
    true = reference_gradients(query, key, value, out, **score)  # of ½ Σ out², as `gradient`'s
    wanted = {"out": out}
    wanted |= {f"gradient of {n}": getattr(true, n) for n in ("query", "key", "value")}
    wanted |= {f"gradient of {n}": true.params[n] for n in used}
    found = [jax.jit(form)(*arguments), *jax.jit(gradient(form))(*arguments)]
    for (what, right), got in zip(wanted.items(), found, strict=False):
        if got.shape != right.shape:
            return f"{what} has shape {got.shape} instead of {right.shape}"
        error = float(np.max(np.abs(np.asarray(got, np.float64) - right)) / np.max(np.abs(right)))
        if not error <= _TOLERANCE:
            return f"{what} is off by {error:.1e} of its largest entry"
    return None
