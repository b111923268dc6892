"""Decoding in Linen (case A22): step t is row t of the full pass, however the tokens come."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.cache import KVCache
from attention_jax.linen import (
    MultiHeadAttention,
    TransformerDecoder,
    TransformerEncoder,
    attention_fn,
    log_length,
)
from tests.modules.linen_calls import apply, init

pytestmark = pytest.mark.thorough

B, T, ROOM, D = 2, 6, 9, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
CAUSAL = aj.masks.causal()


class Flagged(MultiHeadAttention):
    """A layer that is told every time to be causal."""

    def __call__(self, x):
        return super().__call__(x, is_causal=True)


LAYERS = {
    "plain": {"mask": CAUSAL},
    "grouped": {
        "num_kv_heads": 1,
        "positions": "rotary",
        "normalize_qk": True,
        "fused_qkv": True,
        "mask": aj.masks.window(2, 0),
    },
    "relative": {"positions": "relative_bias"},
}


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def start(layer, *rest, room=ROOM):
    """Variables with an empty cache."""
    return init(layer, jnp.ones((B, room, D)), *rest)


def steps(layer, variables, chunks, x=X, *rest, **options):
    """The outputs of a sequence of chunks, joined, and the variables afterwards."""

    @jax.jit
    def step(variables, x, options):
        out, changed = layer.apply(variables, x, *rest, mutable=["cache"], **options)
        return out, {**variables, **changed}

    outs, at = [], 0
    for size in chunks:
        part = {k: v[..., at : at + size] for k, v in options.items()}
        out, variables = step(variables, x[:, at : at + size], part)
        outs.append(out)
        at += size
    return jnp.concatenate(outs, axis=1), variables


@pytest.mark.parametrize("name", LAYERS)
def test_steps_and_chunks_equal_the_full_pass(name):
    full = MultiHeadAttention(2, **LAYERS[name])
    layer = full.clone(decode=True)
    variables = start(layer)
    params = {"params": variables["params"]}
    expected = apply(full, params, X, is_causal=True)
    found, after = steps(layer, variables, (3, 1, 1, 1))
    close(found, expected)
    assert int(after["cache"]["cache_index"]) == T
    if name == "relative":
        # Every token by itself, the flag left on: it changes nothing, going by absolute positions.
        flagged = Flagged(2, decode=True, **LAYERS[name])
        close(steps(flagged, variables, (1,) * T)[0], expected)
    if name != "grouped":
        return
    # State in, state out, with the same numbers; in two chunks.
    cache, outs = KVCache.init(B, ROOM, full.num_kv_heads or 2, 4), []
    step = jax.jit(lambda x, cache: full.apply(params, x, cache, method=full.with_cache))
    for part in (X[:, :3], X[:, 3:]):
        out, cache = step(part, cache)
        outs.append(out)
    close(jnp.concatenate(outs, axis=1), expected)


def test_flax_s_cache_goes_on_in_ours_and_ours_in_flax_s():
    ours = MultiHeadAttention(2, decode=True)
    theirs = nn.MultiHeadDotProductAttention(num_heads=2, decode=True, attention_fn=attention_fn())
    variables = start(theirs)
    assert set(variables["cache"]) == {"cached_key", "cached_value", "cache_index"}
    full = apply(MultiHeadAttention(2), {"params": variables["params"]}, X, mask=CAUSAL)
    first, middle = steps(theirs, variables, (1, 1))
    second, after = steps(ours, middle, (3,), X[:, 2:])
    third, _ = steps(theirs, after, (1,), X[:, 5:])
    close(jnp.concatenate([first, second, third], axis=1), full)


def test_the_weights_of_a_step_are_sown_as_in_flax():
    ours = MultiHeadAttention(2, decode=True)
    theirs = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
    sown = {"sow_weights": True, "mutable": ["cache", "intermediates"]}
    first, second = start(theirs), start(theirs)
    weights = []
    for layer, variables in ((ours, first), (theirs, second)):
        step = jax.jit(lambda v, x, layer=layer: layer.apply(v, x, **sown))
        for t in range(2):
            _, changed = step(variables, X[:, t : t + 1])
            variables = {**variables, "cache": changed["cache"]}
        weights.append(changed["intermediates"]["attention_weights"][0])
        if layer is ours:
            _, changed = step(variables, X[:, 2:])
            chunk = changed["intermediates"]["attention_weights"][0]
    close(*weights)
    whole = {"params": first["params"]}
    expected = apply(MultiHeadAttention(2), whole, X, mask=CAUSAL, method="attention_weights")
    close(chunk, jnp.pad(expected[:, :, 2:], [(0, 0)] * 3 + [(0, ROOM - T)]))


def test_lengths_grow_and_are_not_the_buffer_s():
    """What goes by lengths in a full pass: a mask aligned at the end, a scale by a logarithm."""
    aligned = aj.masks.causal(align="end") & aj.masks.window(2, None)
    full = MultiHeadAttention(2, mask=aligned, score=log_length(train_length=3))
    layer = full.clone(decode=True)
    variables = start(layer)
    params = {"params": variables["params"]}
    found, _ = steps(layer, variables, (4, 1, 1))
    close(found[:, :4], apply(full, params, X[:, :4]))
    for t in (4, 5):
        close(found[:, t], apply(full, params, X[:, : t + 1])[:, t])


def test_a_prompt_padded_on_the_left():
    layer = MultiHeadAttention(2, decode=True, positions="rotary")
    variables = start(layer)
    alone, _ = steps(layer, variables, (3, 3))
    padded = jnp.concatenate([jnp.full((B, 2, D), jnp.nan), X], axis=1)
    valid = jnp.broadcast_to(jnp.arange(T + 2) >= 2, (B, T + 2))
    found, _ = steps(layer, variables, (4, 4), padded, valid=valid)
    close(found[:, 2:], alone)


def test_what_was_never_written_does_not_matter():
    layer = MultiHeadAttention(2, decode=True)
    variables = start(layer)
    expected, _ = steps(layer, variables, (3, 3))
    spoiled = jax.tree.map(lambda x: x + jnp.nan if x.ndim == 4 else x, variables["cache"])
    found, _ = steps(layer, {**variables, "cache": spoiled}, (3, 3))
    close(found, expected)


def test_no_room_is_an_error_or_loud():
    layer = MultiHeadAttention(2, decode=True)
    variables = start(layer, room=4)
    _, full = steps(layer, variables, (4,))
    with pytest.raises(ValueError, match="room for 4"):
        layer.apply(full, X[:, :1], mutable=["cache"])
    out, after = steps(layer, full, (1,))
    assert np.isnan(out).all()
    np.testing.assert_array_equal(after["cache"]["cached_key"], full["cache"]["cached_key"])


def test_what_decoding_does_not_take_is_refused():
    layer = MultiHeadAttention(2, decode=True)
    variables = start(layer)
    step = lambda **o: layer.apply(variables, X[:, :1], mutable=["cache"], **o)  # noqa: E731
    with pytest.raises(ValueError, match="positions"):
        step(query_positions=jnp.arange(1))
    with pytest.raises(ValueError, match=r"1.*inputs_k 6"):
        step(inputs_k=X)
    with pytest.raises(ValueError, match=r"inputs_q has batch \[1\].*cache \[2\]"):
        layer.apply(variables, X[:1, :1], mutable=["cache"])
    with pytest.raises(ValueError, match="decode=True"):
        MultiHeadAttention(2).apply(variables, X, valid=jnp.ones((B, T), bool))


@pytest.mark.parametrize("kind", ["decoder-only", "encoder-decoder"])
def test_stacks_decode(kind):
    memory = X[:, :4] * 2
    rest = () if kind == "decoder-only" else (memory,)
    if kind == "decoder-only":
        options = {"norm": "pre", "scan_layers": True, "positions": "alibi"}
        full = TransformerEncoder(2, 2, D, 16, mask=CAUSAL, **options)
    else:
        full = TransformerDecoder(1, 2, D, 16, num_kv_heads=1)
    layer = full.clone(decode=True)
    variables = start(layer, *rest)
    expected = apply(full, {"params": variables["params"]}, X, *rest)
    found, _ = steps(layer, variables, (3, 3), X, *rest)
    close(found, expected)


def test_a_memory_is_projected_once():
    layer = MultiHeadAttention(2, D)
    variables = init(layer, X, X)
    memory, valid = X[:, ::-1], jnp.array([[True] * 6, [True] * 2 + [False] * 4])
    cache = apply(layer, variables, memory, valid=valid, method="new_memory_cache")
    found = apply(layer, variables, X[:, :2], cache, method="with_memory_cache")
    mask = aj.masks.from_array(valid[:, None, None])
    close(found, apply(layer, variables, X[:, :2], memory, mask=mask))
