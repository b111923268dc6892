"""The cases of modules: ours beside Flax's, with the same parameters and the same numbers."""

from collections.abc import Callable
from typing import Any

import flax.nnx
import jax

import attention_jax.nnx
from experiments.bench.contest import Arguments, Case, Ratio, compiled, normal


def applied(module: Any, shape: tuple[int, ...]) -> tuple[Callable[..., Any], Arguments]:
    """A module as a function of its parameters and one input, and those arguments."""
    graph, state = flax.nnx.split(module)

    def apply(state: Any, x: jax.Array) -> jax.Array:
        return flax.nnx.merge(graph, state)(x)

    return apply, lambda: (state, *normal(0, shape))


def attention_module(width: int, heads: int, length: int, batch: int) -> Case:
    """Multi-head self-attention, forward and backward to inputs and parameters."""
    shape = (batch, length, width)
    theirs = flax.nnx.MultiHeadAttention(heads, width, decode=False, rngs=flax.nnx.Rngs(0))
    ours = attention_jax.nnx.MultiHeadAttention(heads, width, rngs=flax.nnx.Rngs(0))
    contestants = {"ours": compiled(*applied(ours, shape))}
    contestants["flax.nnx"] = compiled(*applied(theirs, shape))
    title = f"MultiHeadAttention, width {width}, {heads} heads, T = {length}, B {batch}"
    ratio = Ratio("ours", "flax.nnx", {"gradient": 0.6})
    return Case(f"module-{length}", title, contestants, [ratio])


def cases() -> list[Case]:
    """The table's part."""
    return [attention_module(512, 8, 1024, 4)]
