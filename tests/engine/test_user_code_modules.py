"""A caller's functions in modules, in both flavours, and in what runs modules."""

import gc
import weakref

import jax
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
import attention_jax.linen as al
import attention_jax.nnx as an
from tests.engine.user_code import State, check_reads_and_lets_go

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 8)).astype(np.float32)
IDS = np.array([[1, 2, 3, 4], [2, 3, 4, 1]])


def modules(state):
    """Calls of modules that hold functions of the state, in both flavours."""
    score, mask = aj.scores.custom(state.score), aj.masks.custom(state.see)
    language = (1, 2, 8, 16, 11)
    decoding = {"eos": 0, "max_length": 3, "num_beams": 2}

    def nnx_layer(cls, *sizes, **options):
        return cls(*sizes, rngs=nnx.Rngs(0), **options)

    def linen_layer(cls, *sizes, inputs=X, **options):
        module = cls(*sizes, **options)
        return module, module.init(jax.random.key(0), inputs)

    def linen_call(*given, **options):
        module, variables = linen_layer(*given, **options)
        return module.apply(variables, X)

    def captured(module, **options):
        return aj.diagnostics.capture(module, X, **options).output

    def captured_linen():
        module, variables = linen_layer(al.MultiHeadAttention, 2, score=score)
        return captured(module, variables=variables)

    def decoded_linen():
        model, variables = linen_layer(
            al.TransformerLM, *language, inputs=IDS, activation=state.activation
        )
        return al.beam_decode(model, variables, IDS, **decoding)[1]

    def decoded():
        model = nnx_layer(an.TransformerLM, *language, activation=state.activation)
        return an.beam_decode(model, IDS, **decoding)[1]

    def function(x):
        heads = aj.heads.split_heads(x, 2)
        return aj.attend(heads, heads, heads) * state.w

    def gradient_norm():
        module = nnx_layer(an.MultiHeadAttention, 2, 8)
        found = aj.diagnostics.capture(module, X, loss=state.loss)
        return found.gradient_norms["MultiHeadAttention"]["all"]

    return {
        "nnx, score": lambda: nnx_layer(an.MultiHeadAttention, 2, 8, score=score)(X),
        "nnx, mask": lambda: nnx_layer(an.MultiHeadAttention, 2, 8, mask=mask)(X),
        "nnx, features": lambda: nnx_layer(an.LinearAttention, 2, 8, feature_map=state.features)(X),
        "nnx, capture": lambda: captured(nnx_layer(an.MultiHeadAttention, 2, 8, score=score)),
        "nnx, loss": gradient_norm,
        "nnx, inputs": lambda: aj.diagnostics.attention_inputs(
            nnx_layer(an.MultiHeadAttention, 2, 8, mask=mask, score=score), X
        )[0],
        "nnx, decode": decoded,
        "linen, score": lambda: linen_call(al.MultiHeadAttention, 2, score=score),
        "linen, mask": lambda: linen_call(al.MultiHeadAttention, 2, mask=mask),
        "linen, features": lambda: linen_call(al.LinearAttention, 2, feature_map=state.features),
        "linen, capture": captured_linen,
        "linen, decode": decoded_linen,
        "function, capture": lambda: captured(
            lambda x: state.w * x * aj.attend(*[x[..., None, :]] * 3)[..., 0, :]
        ),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("module", list(modules(State())))
def test_every_module_reads_the_state_and_lets_it_go(module):
    check_reads_and_lets_go(lambda state: modules(state)[module])


def test_no_model_outlives_what_was_made_with_it():
    nnx_model = an.TransformerLM(1, 2, 8, 16, 11, rngs=nnx.Rngs(0))
    linen_model = al.TransformerLM(1, 2, 8, 16, 11)
    variables = linen_model.init(jax.random.key(0), IDS)
    kept = [weakref.ref(x) for x in (nnx_model, linen_model)]
    an.greedy_decode(nnx_model, IDS, max_length=2)
    al.greedy_decode(linen_model, variables, IDS, max_length=2)
    aj.diagnostics.capture(nnx_model, IDS)
    aj.diagnostics.capture(linen_model, IDS, variables=variables)
    del nnx_model, linen_model
    gc.collect()
    assert [x() for x in kept] == [None, None]
