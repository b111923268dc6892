"""Attention as the textbook writes it and as the library computes it, side by side and checked.

    textbook dot        softmax(q kᵀ / √H) v               keeps [B, N, T, S]
    textbook additive   softmax(v · tanh(q W + k U)) v     keeps [B, N, T, S, A]
    ours                attend(q, k, v, score=...)         the same numbers, block by block

No number is printed of a form that is wrong: `check` compares each with the float64 reference,
values and gradients, on sizes that no block divides.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import attention_jax as aj
from attention_jax.testing import reference_attention, reference_gradients

Parameters = dict[str, Array]
Form = Callable[..., Array]
SCORES = ("dot", "additive")
# Relative to the largest entry of what is compared: float32, sums of some ten terms.
TOLERANCE = 2e-5


def textbook_dot(query: Array, key: Array, value: Array, params: Parameters) -> Array:
    """Return softmax(q kᵀ / √H) v, with all weights in memory at once."""
    del params
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), value)


def textbook_additive(query: Array, key: Array, value: Array, params: Parameters) -> Array:
    """Return softmax(v · tanh(q W + k U)) v, with a hidden layer [B, N, T, S, A] in memory."""
    rows = jnp.einsum("btnh,ha->bnta", query, params["w_query"])
    columns = jnp.einsum("bsnh,ha->bnsa", key, params["w_key"])
    hidden = jnp.tanh(rows[:, :, :, None] + columns[:, :, None])
    weights = jax.nn.softmax(hidden @ params["v"], axis=-1)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def ours(score: str, implementation: str | None = None) -> Form:
    """Return the library's attention with this score, the implementation picked or named."""

    def form(query: Array, key: Array, value: Array, params: Parameters) -> Array:
        chosen = aj.scores.additive(**params) if score == "additive" else aj.scores.scaled_dot()
        return aj.attend(query, key, value, score=chosen, implementation=implementation)

    return form


def picked(score: str, arguments: tuple[Any, ...]) -> str:
    """Return the name of the implementation that the library picks for these arguments."""
    query, key, value, params = arguments
    chosen = aj.scores.additive(**params) if score == "additive" else aj.scores.scaled_dot()
    return aj.explain(query, key, value, score=chosen).implementation


FORMS: dict[str, tuple[str, Form]] = {
    "textbook dot": ("dot", textbook_dot),
    "our dot": ("dot", ours("dot")),
    "textbook additive": ("additive", textbook_additive),
    "our additive": ("additive", ours("additive")),
}


def forward_backward(form: Form) -> Callable[..., Any]:
    """Return the function that gives the gradients for query, key, value and the parameters."""

    def loss(query: Array, key: Array, value: Array, params: Parameters) -> Float[Array, ""]:
        out = form(query, key, value, params)
        # Weights that differ by entry, so that no gradient is zero by symmetry.
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return jax.grad(loss, argnums=(0, 1, 2, 3))


def inputs(
    seed: int, length: int, *, heads: int, depth: int, hidden: int, keys: int | None = None
) -> tuple[Array, Array, Array, Parameters]:
    """Return query, key, value ``[1, length, heads, depth]`` ~ N(0, 1) and additive parameters."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

    keys = length if keys is None else keys
    query = normal(1, length, heads, depth)
    key, value = normal(1, keys, heads, depth), normal(1, keys, heads, depth)
    params = {
        "w_query": normal(depth, hidden, scale=depth**-0.5),
        "w_key": normal(depth, hidden, scale=depth**-0.5),
        "v": normal(hidden, scale=hidden**-0.5),
    }
    return query, key, value, params


def shapes(length: int, *, heads: int, depth: int, hidden: int) -> tuple[Any, ...]:
    """Return what `inputs` returns as shapes alone, to compile for lengths too long to run."""
    return jax.eval_shape(lambda: inputs(0, length, heads=heads, depth=depth, hidden=hidden))


def check(name: str) -> str | None:
    """Return what is wrong with a form, or None: its values and gradients against float64."""
    score, form = FORMS[name]
    arguments = inputs(7, 19, heads=2, depth=5, hidden=3, keys=23)
    query, key, value, params = arguments
    used = params if score == "additive" else {}
    kind = "additive" if score == "additive" else "scaled_dot"
    out = jax.jit(form)(*arguments)
    wanted = reference_attention(query, key, value, score=kind, params=used or None).out
    if wrong := _differs("out", out, wanted):
        return wrong
    cotangent = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
    got = jax.jit(forward_backward(form))(*arguments)
    true = reference_gradients(query, key, value, cotangent, score=kind, params=used or None)
    pairs = [("query", got[0], true.query), ("key", got[1], true.key)]
    pairs += [("value", got[2], true.value)]
    pairs += [(k, got[3][k], true.params[k]) for k in used]
    return next(filter(None, (_differs(f"gradient of {n}", a, b) for n, a, b in pairs)), None)


def _differs(what: str, got: Array, wanted: np.ndarray) -> str | None:
    if got.shape != wanted.shape:
        return f"{what} has shape {got.shape} instead of {wanted.shape}"
    error = float(np.max(np.abs(np.asarray(got, np.float64) - wanted)) / np.max(np.abs(wanted)))
    return None if error <= TOLERANCE else f"{what} is off by {error:.1e} of its largest entry"
