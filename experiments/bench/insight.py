"""The cases of diagnostics and distillation: their overhead over plain attention."""

from collections.abc import Callable
from typing import Any

import flax.nnx
import jax

from attention_jax.diagnostics import capture
from attention_jax.distillation import attention_divergence
from attention_jax.nnx import TransformerEncoder
from experiments.bench.contest import (
    Arguments,
    Case,
    Contestant,
    Limit,
    Prepared,
    Ratio,
    compiled,
    normal,
)
from experiments.bench.exact import MB, ours, qkv


def divergence(query_t: Any, key_t: Any, query_s: Any, key_s: Any) -> jax.Array:
    """How far a student's map is from its teacher's, row by row."""
    return attention_divergence((query_t, key_t), (query_s, key_s))


def divergence_case(length: int) -> Case:
    """The divergence of two maps beside one attention: two maps in two passes, and no values."""
    shape = (1, length, 1, 64)

    def two_maps() -> tuple[Any, ...]:
        return normal(0, *[shape] * 4)

    contestants = {
        "divergence": compiled(divergence, two_maps),
        "flash": compiled(ours(implementation="flash"), qkv(1, length, 1)),
    }
    return Case(
        f"divergence-{length}",
        f"KL of two maps, T = S = {length}, one head of depth 64: gradient to the student",
        contestants,
        [Ratio("divergence", "flash", {"gradient": 3.0})],
        [Limit("divergence", "gradient", "temporaries", 64 * MB)],
        passes=("gradient",),
    )


def called(function: Callable[..., Any], arguments: Arguments) -> Contestant:
    """A function of a module that compiles by itself, in the call that is not measured."""

    def prepare(which: str) -> Prepared:
        assert which == "forward"
        given = arguments()
        return Prepared(lambda: function(*given))

    return prepare


def looked_at(module: Any, x: Any) -> Any:
    """What `capture` computes."""
    found = capture(module, x)
    return found.output, found.records


def capture_case(layers: int, width: int, heads: int, length: int, batch: int) -> Case:
    """A model with and without diagnostics, both called with the module."""

    def arguments() -> tuple[Any, ...]:
        module = TransformerEncoder(layers, heads, width, 4 * width, rngs=flax.nnx.Rngs(0))
        return module, *normal(0, (batch, length, width))

    plain = flax.nnx.jit(lambda module, x: module(x))
    contestants = {"capture": called(looked_at, arguments), "model": called(plain, arguments)}
    size = f"width {width}, {heads} heads, T = {length}, B {batch}"
    return Case(
        f"capture-{length}",
        f"capture of {layers} encoder layers, {size}",
        contestants,
        [Ratio("capture", "model", {"forward": 1.6})],
        passes=("forward",),
    )


def cases() -> list[Case]:
    """The table's part."""
    return [divergence_case(8192), capture_case(2, 512, 8, 512, 4)]
