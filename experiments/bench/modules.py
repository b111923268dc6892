"""The cases of modules: this library's against Flax's, with equal parameters and results."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

import attention_jax.linen
import attention_jax.nnx
from attention_jax.cache import KVCache
from experiments.bench.contest import (
    Arguments,
    Case,
    Contestant,
    Prepared,
    Ratio,
    compiled,
    normal,
)
from experiments.core.measure import compile_for

Step = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]


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


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A step of decoding into the last slot of a cache, in three modules with one set of numbers.

    Attributes:
        width: D of all of them.
        heads: N.
        length: the number of the cache's slots.
        batch: B.
    """

    width: int
    heads: int
    length: int
    batch: int

    def contestants(self) -> dict[str, Contestant]:
        """Ours of both flavours, and Flax's."""
        return {
            "ours (linen)": self._stepping(self._ours_linen),
            "ours (nnx)": self._stepping(self._ours_nnx),
            "flax.linen": self._stepping(self._theirs),
        }

    def token(self) -> jax.Array:
        """The next token's state."""
        return normal(1, (self.batch, 1, self.width))[0]

    def _variables(self) -> tuple[Any, Any, Any]:
        """Flax's module, its parameters, and its cache with all slots but one written."""
        layer = flax.linen.MultiHeadDotProductAttention(num_heads=self.heads, decode=True)
        shape = jax.ShapeDtypeStruct((self.batch, self.length, self.width), jnp.float32)
        made = jax.jit(lambda key: layer.init(key, jnp.zeros(shape.shape)))(jax.random.key(0))
        key = made["cache"]["cached_key"]
        names, arrays = ("cached_key", "cached_value"), normal(2, key.shape, key.shape)
        index = {"cache_index": jnp.asarray(self.length - 1, jnp.int32)}
        return layer, made["params"], {**dict(zip(names, arrays, strict=True)), **index}

    def _theirs(self) -> tuple[Step, Any, Any]:
        layer, params, cache = self._variables()

        def step(params: Any, cache: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            variables = {"params": params, "cache": cache}
            out, changed = layer.apply(variables, x, mutable=["cache"])
            return out, {**changed["cache"], "cache_index": cache["cache_index"]}

        return step, params, cache

    def _ours_linen(self) -> tuple[Step, Any, Any]:
        layer = attention_jax.linen.MultiHeadAttention(num_heads=self.heads, decode=True)
        _, params, cache = self._variables()

        def step(params: Any, cache: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            variables = {"params": params, "cache": cache}
            out, changed = layer.apply(variables, x, mutable=["cache"])
            kept = {name: cache[name] for name in ("cache_index", "cache_lengths")}
            return out, {**changed["cache"], **kept}

        places = jnp.broadcast_to(jnp.arange(self.length), (self.batch, self.length))
        own = {
            "cache_places": jnp.where(places < self.length - 1, places, -1),
            "cache_lengths": jnp.full(self.batch, self.length - 1),
            "cache_lost": jnp.zeros(self.batch, bool),
        }
        return step, params, {**cache, **own}

    def _ours_nnx(self) -> tuple[Step, Any, Any]:
        module = attention_jax.nnx.MultiHeadAttention(self.heads, self.width, rngs=flax.nnx.Rngs(0))
        _, params, cache = self._ours_linen()
        module = attention_jax.linen.to_nnx({"params": params}, module)
        graph, state = flax.nnx.split(module)

        def step(state: Any, cache: KVCache, x: jax.Array) -> tuple[jax.Array, Any]:
            out, after = flax.nnx.merge(graph, state).with_cache(x, cache)
            return out, dataclasses.replace(after, index=cache.index, lengths=cache.lengths)

        own = {name.removeprefix("cache_").removeprefix("cached_"): x for name, x in cache.items()}
        return step, state, KVCache(**own)

    def _stepping(self, make: Callable[[], tuple[Step, Any, Any]]) -> Contestant:
        """Each call writes into the cache that the last one returned, which is donated."""

        def prepare(which: str) -> Prepared:
            step, params, cache = make()
            x = self.token()
            expected = jax.jit(self._theirs()[0])(*self._theirs()[1:], x)[0]
            executable = compile_for(step, (params, cache, x), donate=(1,))
            state = [jax.tree.map(jnp.copy, cache)]

            def call() -> jax.Array:
                out, state[0] = executable.call(params, state[0], x)
                return out

            np.testing.assert_allclose(call(), expected, rtol=1e-4, atol=1e-5)
            return Prepared(call, executable.temporaries, executable.compile_seconds)

        return prepare


def decode_step(width: int, heads: int, length: int, batch: int) -> Case:
    """One step of cached decoding, the cache donated."""
    contestants = Decoding(width, heads, length, batch).contestants()
    ratios = [Ratio(of, "flax.linen", {"forward": 1.1}) for of in ("ours (linen)", "ours (nnx)")]
    title = f"decoding step, width {width}, {heads} heads, cache of {length}, B {batch}"
    return Case(f"decode-{length}", title, contestants, ratios, passes=("forward",))


def cases() -> list[Case]:
    """The table's part."""
    return [attention_module(512, 8, 1024, 4), decode_step(512, 8, 4096, 4)]
