"""The cases of exact attention: this library against jax.nn, Flax, PyTorch and itself."""

import functools
from collections.abc import Callable
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from experiments.bench.contest import (
    Arguments,
    Case,
    Contestant,
    Limit,
    Ratio,
    compiled,
    normal,
    torch_attention,
)

MB = 2**20


def qkv(batch: int, length: int, heads: int, depth: int = 64, dtype: Any = np.float32) -> Arguments:
    """Query, key and value of one shape."""
    return lambda: normal(0, *[(batch, length, heads, depth)] * 3, dtype=dtype)


def ours(**options: Any) -> Callable[..., Any]:
    """Our attention with these options."""
    return functools.partial(aj.attend, **options)


def peers(arguments: Arguments) -> dict[str, Contestant]:
    """Ours and everybody else's, on the same arrays."""
    found = {
        "ours": compiled(ours(), arguments),
        "jax.nn": compiled(jax.nn.dot_product_attention, arguments),
        "flax.nnx": compiled(flax.nnx.dot_product_attention, arguments),
    }
    torch = torch_attention(arguments)
    return found if torch is None else {**found, "torch": torch}


def against_peers(
    length: int, batch: int, jax_nn: tuple[float, float] | None, torch: float | None, sized: str
) -> Case:
    """The scaled dot product beside everybody else's."""
    contestants = peers(qkv(batch, length, 8))

    def limits(forward: float, gradient: float) -> dict[str, float]:
        return {"forward": forward, "gradient": gradient}

    ratios = [Ratio("ours", "jax.nn", limits(*jax_nn) if jax_nn else {}), Ratio("ours", "flax.nnx")]
    if "torch" in contestants:
        ratios.append(Ratio("ours", "torch", limits(torch, torch) if torch else {}))
    title = f"scaled dot product, T = S = {length}, N 8, H 64, B {batch}"
    return Case(f"dot-{length}", title, contestants, ratios, sized=sized)


def against_full(
    name: str,
    title: str,
    arguments: Arguments,
    at_most: float | dict[str, float],
    sized: str,
    **options: Any,
) -> Case:
    """An option of ours beside the same attention without it."""
    if not isinstance(at_most, dict):
        at_most = {"forward": at_most, "gradient": at_most}
    contestants = {name: compiled(ours(**options), arguments), "full": compiled(ours(), arguments)}
    return Case(name, title, contestants, [Ratio(name, "full", at_most)], sized=sized)


def doubling(
    name: str, title: str, function: Callable[..., Any], at: Callable[[int], Arguments],
    length: int, at_most: float, sized: str,
) -> Case:  # fmt: skip
    """One function at a length and at twice that length."""
    both = {f"T {n}": compiled(function, at(n)) for n in (length, 2 * length)}
    long, short = f"T {2 * length}", f"T {length}"
    limits = {"forward": at_most, "gradient": at_most}
    return Case(name, title, both, [Ratio(long, short, limits)], sized=sized)


def additive_arguments(length: int, hidden: int = 64, depth: int = 64) -> Arguments:
    """Query, key, value for one head, and the parameters of an additive score."""

    def make() -> tuple[Any, ...]:
        *arrays, w_query, w_key, v = normal(
            0, *[(1, length, 1, depth)] * 3, (depth, hidden), (depth, hidden), (hidden,)
        )
        return (*arrays, w_query * depth**-0.5, w_key * depth**-0.5, v * hidden**-0.5)

    return make


def additive(
    query: Any, key: Any, value: Any, w_query: Any, w_key: Any, v: Any, **options: Any
) -> jax.Array:
    """Ours."""
    score = aj.scores.additive(w_query, w_key, v)
    return aj.attend(query, key, value, score=score, **options)


def textbook_additive(
    query: Any, key: Any, value: Any, w_query: Any, w_key: Any, v: Any
) -> jax.Array:
    """softmax(v · tanh(q W + k U)) v with a hidden layer `[B, N, T, S, A]` in memory."""
    rows, columns = query @ w_query, key @ w_key
    rows, columns = (jnp.swapaxes(x, 1, 2) for x in (rows, columns))
    logits = jnp.tanh(rows[..., :, None, :] + columns[..., None, :, :]) @ v
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(logits, axis=-1), value)


def tiled_additive(query: Any, key: Any, value: Any, w_query: Any, w_key: Any, v: Any) -> jax.Array:
    """The same with tanh for every pair, in tiles of 64 × 256 that are recomputed for the gradient.

    The best tiling of the textbook's form that was found by measuring tiles.
    """
    rows, columns, values = (query @ w_query)[0, :, 0], (key @ w_key)[0, :, 0], value[0, :, 0]
    tiles = columns.reshape(-1, 256, columns.shape[-1]), values.reshape(-1, 256, values.shape[-1])

    @jax.checkpoint
    def some_rows(block: Any) -> Any:
        @jax.checkpoint
        def some_keys(state: Any, tile: Any) -> Any:
            out, top, total = state
            logits = jnp.tanh(block[:, None, :] + tile[0][None, :, :]) @ v
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - new_top[:, None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[:, None] + weights @ tile[1]
            return (out, new_top, total * shrink + jnp.sum(weights, axis=-1)), None

        start = jnp.zeros((64, values.shape[-1])), jnp.full(64, -1e30), jnp.zeros(64)
        (out, _, total), _ = jax.lax.scan(some_keys, start, tiles)
        return out / total[:, None]

    out = jax.lax.map(some_rows, rows.reshape(-1, 64, rows.shape[-1]))
    return out.reshape(1, -1, 1, values.shape[-1])


def additive_case(length: int, sized: str, *, aimed: bool) -> Case:
    """The additive score beside the textbook's form, its best tiling and the scaled dot product."""

    def aims(**limits: float) -> dict[str, float]:
        return limits if aimed else {}

    arguments = additive_arguments(length)
    contestants = {
        "ours": compiled(additive, arguments),
        "tiled tanh": compiled(tiled_additive, arguments),
        "scaled dot": compiled(ours(), lambda: arguments()[:3]),
        "textbook": compiled(textbook_additive, arguments),
    }
    ratios = [
        Ratio("ours", "tiled tanh", aims(forward=0.45, gradient=0.55)),
        Ratio("ours", "textbook", aims(forward=0.20, gradient=0.08)),
        Ratio("ours", "scaled dot", aims(forward=5.0)),
    ]
    title = f"additive score, T = S = {length}, A 64, H 64, one head"
    return Case(f"additive-{length}", title, contestants, ratios, sized=sized)


def memory_case(
    name: str, function: Callable[..., Any], at: Callable[[int], Arguments], length: int, sized: str
) -> Case:
    """Temporaries of the gradient at a length and at twice that length; nothing is run."""
    short, long = f"T {length}", f"T {2 * length}"
    both = {short: compiled(function, at(length)), long: compiled(function, at(2 * length))}
    return Case(
        name,
        f"gradient, T = S = {length}, one head of depth 64: temporaries",
        both,
        [Ratio(long, short, {"gradient": 2.2}, "temporaries")],
        [Limit(short, "gradient", "temporaries", 32 * MB)],
        passes=("gradient",),
        run=False,
        sized=sized,
    )


def with_statistics(query: Any, key: Any, value: Any) -> Any:
    """The output with entropy and largest logit added in, so that both have a gradient."""
    out, stats = aj.attend_with_stats(query, key, value)
    return out + jnp.swapaxes(stats.entropy + stats.max_logit, -1, -2)[..., None]


def statistics_case(length: int, sized: str) -> Case:
    """The statistics of every row beside attention without them."""
    arguments = qkv(1, length, 2)
    contestants = {
        "statistics": compiled(with_statistics, arguments),
        "none": compiled(ours(), arguments),
    }
    title = f"entropy and largest logit of every row, T = S = {length}, N 2"
    return Case("statistics", title, contestants, [Ratio("statistics", "none")], sized=sized)


def cases() -> list[Case]:
    """The table."""
    masks = aj.masks
    window = masks.causal() & masks.window(255, 0)
    ids = np.repeat(np.arange(16), 1024)[None]
    one = functools.partial(qkv, 1, heads=1)
    drop = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
    flash = ours(implementation="flash")
    return [
        against_peers(256, 16, (0.60, 0.75), None, "quick"),
        against_peers(1024, 4, (0.40, 0.45), None, "default"),
        against_peers(4096, 1, (0.35, 0.35), 1.5, "default"),
        against_full(
            "causal", "causal, T = S = 4096, N 8", qkv(1, 4096, 8), 0.62, "default",
            mask=masks.causal(),
        ),
        against_full(
            "window-256", "causal() & window(255, 0), T = S = 16384, one head", one(16384), 1 / 12,
            "default", mask=window,
        ),
        doubling(
            "window-256-doubled", "causal() & window(255, 0), T = S from 16384 to 32768",
            ours(mask=window), one, 16384, 2.3, "quick",
        ),
        against_full(
            "segments", "16 packed segments of 1024, one head", one(16384), 1 / 8, "default",
            mask=masks.segments(ids),
        ),
        additive_case(512, "quick", aimed=False),
        additive_case(2048, "default", aimed=True),
        against_full(
            "dropout", "dropout 0.1, T = S = 2048, N 2", qkv(1, 2048, 2), 1.5, "quick", **drop
        ),
        statistics_case(4096, "default"),
        memory_case("memory-dot", flash, one, 16384, "quick"),
        memory_case("memory-additive", additive, additive_arguments, 16384, "quick"),
        Case(
            "compile", "tracing and compiling, T = S = 4096, N 8",
            {"flash": compiled(flash, qkv(1, 4096, 8))},
            limits=[Limit("flash", "gradient", "compile", 3.0)], passes=("gradient",), run=False,
            sized="quick",
        ),
    ]  # fmt: skip
