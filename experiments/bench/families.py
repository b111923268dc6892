"""The cases of sparse patterns, sub-quadratic families and a relative bias."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import attention_jax as aj
from attention_jax import masks, subquadratic
from attention_jax.masks import Mask
from experiments.bench.contest import Arguments, Case, Ratio, compiled, normal
from experiments.bench.exact import against_full, doubling, ours, qkv

_BLOCK = 64
_KEY = jax.random.key(0)


def block_density(mask: Mask, length: int, size: int = _BLOCK) -> float:
    """Return the share of blocks of ``size`` that are not empty."""
    return float(np.mean(np.asarray(mask.block_map(length, length, size).kinds) > 0))


def pattern(name: str, title: str, mask: Mask, length: int) -> Case:
    """A sparse pattern beside full attention: at most twice the share of blocks it touches."""
    share = block_density(mask, length)
    words = f"{title}, T = S = {length}, one head; {share:.3f} of blocks of {_BLOCK}"
    arguments = qkv(1, length, 1)
    return against_full(name, words, arguments, round(2 * share, 4), "default", mask=mask)


def causal_linear(query: Any, key: Any, value: Any) -> jax.Array:
    """Linear attention in chunks."""
    return subquadratic.linear_attention(query, key, value, mask=masks.causal(), form="chunked")


def linear_case(length: int) -> Case:
    """Causal linear attention beside full softmax attention."""
    arguments = qkv(1, length, 1)
    contestants = {
        "linear": compiled(causal_linear, arguments),
        "full": compiled(ours(), arguments),
    }
    limits = {"forward": 0.1, "gradient": 0.1}
    title = f"causal linear attention in chunks, T = S = {length}, one head"
    return Case("linear", title, contestants, [Ratio("linear", "full", limits)])


def lsh(query: Any, value: Any) -> jax.Array:
    """Reformer's attention, one round."""
    return subquadratic.lsh_attention(query, value, _KEY)


def relative_case(length: int, heads: int) -> Case:
    """T5's relative bias beside no bias, both by the flash kernel."""

    def arguments() -> tuple[Any, ...]:
        *arrays, table = normal(0, *[(1, length, heads, 64)] * 3, (heads, 32))
        return (*arrays, table)

    def biased(query: Any, key: Any, value: Any, table: Any) -> jax.Array:
        bias = aj.positions.relative_bias(table)
        return aj.attend(query, key, value, bias=bias, implementation="flash")

    plain: Callable[..., Any] = ours(implementation="flash")
    contestants = {
        "T5 bias": compiled(biased, arguments),
        "no bias": compiled(plain, lambda: arguments()[:3]),
    }
    limits = {"forward": 1.4, "gradient": 1.4}
    title = f"T5's relative bias in flash, T = S = {length}, N {heads}"
    return Case("relative-bias", title, contestants, [Ratio("T5 bias", "no bias", limits)])


def cases() -> list[Case]:
    """The table."""

    def one(length: int) -> Arguments:
        return qkv(1, length, 1)

    def shared(length: int) -> Arguments:
        return lambda: normal(0, *[(1, length, 1, 64)] * 2)

    return [
        pattern("bigbird", "BigBird, blocks of 64", masks.bigbird(_KEY, 8192, _BLOCK), 8192),
        pattern("longformer", "Longformer, window 512", masks.longformer(512, _BLOCK), 8192),
        linear_case(16384),
        doubling(
            "linear-doubled", "causal linear attention in chunks, T from 8192 to 16384",
            causal_linear, one, 8192, 2.2, "default",
        ),
        doubling(
            "lsh-doubled", "LSH attention, T from 8192 to 16384", lsh, shared, 8192, 2.4, "default"
        ),
        relative_case(4096, 1),
    ]  # fmt: skip
