"""`jax.export` with a symbolic batch: every layer, caches and decoding, in both flavours."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import export

import attention_jax as aj
from attention_jax.masks import window
from tests.modules.flavours import Made
from tests.modules.layers_table import FLAVOURS, cases

QUICK = (
    "MultiHeadAttention rotary",
    "LinearAttention",
    "LSHAttention",
    "TransformerDecoder scanned",
)
THOROUGH = pytest.mark.thorough
NAMES = [
    name if name in QUICK else pytest.param(name, marks=THOROUGH) for name in cases(FLAVOURS["nnx"])
]


def symbolic(arrays):
    """The shapes of arrays, their first axis a symbolic batch `b`."""
    (batch,) = export.symbolic_shape("b")
    return [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays]


def drawn(arrays, batch):
    """Arrays of the same lengths with `batch` random examples; ids below 11."""
    rng = np.random.default_rng(batch)
    for x in arrays:
        shape = (batch, *x.shape[1:])
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        yield (rng.integers(1, 11, shape) if whole else rng.normal(size=shape)).astype(x.dtype)


def check(run, arrays, **tolerance):
    """An exported function gives at two sizes of the batch what the function gives."""
    run = jax.jit(run)
    exported = export.export(run)(*symbolic(arrays))
    for batch in (1, 3):
        inputs = list(drawn(arrays, batch))
        found, expected = exported.call(*inputs), run(*inputs)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            x, y = (np.asarray(z, np.float64) for z in (x, y))
            np.testing.assert_allclose(x, y, **{"rtol": 1e-3, "atol": 1e-4, **tolerance})


@pytest.mark.parametrize("name", NAMES)
def test_every_layer(name, flavour):
    make, inputs = cases(FLAVOURS[flavour])[name]
    low = any(getattr(make, "keywords", {}).get("dtype") == x for x in (jnp.bfloat16,))
    tolerance = {"rtol": 0.1, "atol": 0.1} if low else {}
    if flavour == "linen":
        module = make()
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        quiet = "deterministic" in inspect.signature(type(module).__call__).parameters
        options = {"deterministic": True} if quiet else {}
        variables = module.init(keys, *inputs, **options)
        check(functools.partial(module.apply, variables, **options), inputs, **tolerance)
        return
    module = make(rngs=flax_nnx.Rngs(0))
    module.eval()
    graph, state = flax_nnx.split(module)
    check(lambda *arrays: flax_nnx.merge(graph, state)(*arrays), inputs, **tolerance)


@pytest.mark.parametrize(
    "positions",
    [pytest.param(None, marks=THOROUGH), "rotary", "alibi", "relative_bias", "shaw"],
)
def test_a_symbolic_length(positions, flavour):
    made = Made(
        flavour,
        lambda lib, **more: lib.MultiHeadAttention(
            2, 8, positions=positions, mask=aj.masks.causal(), **more
        ),
    )
    (batch, length) = export.symbolic_shape("b, t")
    exported = export.export(jax.jit(made))(jax.ShapeDtypeStruct((batch, length, 8), np.float32))
    for shape in ((1, 3, 8), (2, 6, 8)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(exported.call(x), made(x), rtol=1e-4, atol=1e-5)


def language(flavour, **options):
    return Made(flavour, lambda lib, **more: lib.TransformerLM(1, 2, 8, 16, 11, **options, **more))


@pytest.mark.parametrize("rolling", [True, pytest.param(False, marks=THOROUGH)])
def test_a_cache_that_is_filled_inside(rolling, flavour):
    made = language(flavour, mask=window(3, 0))

    def run(ids):
        cache = made.model.new_cache(ids.shape[0], 9, rolling=rolling)
        outs = []
        for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:]):
            out, cache = made(part, cache, method="with_cache")
            outs.append(out)
        return jnp.concatenate(outs, 1), cache

    check(run, [jnp.zeros((2, 7), jnp.int32)])


def test_a_cache_that_is_an_argument(flavour):
    made = language(flavour)
    step = jax.jit(lambda ids, cache: made(ids, cache, method="with_cache"))
    (batch,) = export.symbolic_shape("b")

    def sized(x, size):
        shape = tuple(size if n == 5 else n for n in x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    empty = made.model.new_cache(5, 6)  # no other axis has this size
    ids = jax.ShapeDtypeStruct((batch, 1), np.int32)
    exported = export.export(step)(ids, jax.tree.map(lambda x: sized(x, batch), empty))
    for size in (1, 3):
        cache, token = made.model.new_cache(size, 6), jnp.full((size, 1), 2, jnp.int32)
        for x, y in zip(
            *map(jax.tree.leaves, (exported.call(token, cache), step(token, cache))), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoder", [False, pytest.param(True, marks=THOROUGH)])
@pytest.mark.parametrize(
    "name",
    [
        "greedy_decode",
        pytest.param("beam_decode", marks=THOROUGH),
        pytest.param("sample_decode", marks=THOROUGH),
    ],
)
def test_decoders(name, encoder, flavour):
    options = {"max_length": 4, "eos": 3, **({"num_beams": 2} if name == "beam_decode" else {})}
    made = language(flavour)
    if encoder:
        made = Made(flavour, lambda lib, **more: lib.Transformer(1, 2, 8, 16, 11, 11, **more))
        options["bos"] = 1
    key = [jax.random.key(0)] if name == "sample_decode" else []
    check(lambda ids: made.decode(name, ids, *key, **options), [jnp.zeros((2, 3), jnp.int32)])
