"""The position schemes of the study: embeddings added to the input, options of attention.

none             nothing: only the causal mask depends on the order
log-n            nothing, and logits times ln T / ln T_trained
sinusoidal       added to the embeddings
learned          a table added to the embeddings; rows past the trained length are untrained
rotary           queries and keys rotated; tested unscaled, and with three scalings:
rotary-linear    positions divided by test length / trained length
rotary-ntk       a larger base
rotary-yarn      low frequencies divided, high ones kept, logits scaled
alibi            minus slope · distance
t5               a learned bias for each bucket of distances
shaw             a learned key for each clipped distance
transformer-xl   sinusoids of the distance, weighted by the query
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

import attention_jax as aj
from attention_jax import nnx, positions
from experiments.models.reader import Layer

SCHEMES = (
    "none", "log-n", "sinusoidal", "learned", "rotary", "rotary-linear", "rotary-ntk",
    "rotary-yarn", "alibi", "t5", "shaw", "transformer-xl",
)  # fmt: skip
# Schemes that change the model at longer inputs, each with the one it is trained as.
STRETCHED = {"log-n": "log-n", **{f"rotary-{s}": "rotary" for s in ("linear", "ntk", "yarn")}}


def position_embedding(scheme: str) -> str:
    """Return the position embedding of the scheme."""
    return scheme if scheme in ("sinusoidal", "learned") else "none"


def trained_as(scheme: str) -> str:
    """Return the scheme whose trained model this one is tested with."""
    return STRETCHED.get(scheme, scheme)


def layer(scheme: str, *, trained: int, tested: int, width: int, head_depth: int) -> Layer:
    """Return the options of a layer for the scheme.

    Args:
        scheme: one of `SCHEMES`.
        trained: length of the longest input in training.
        tested: length of the current input.
        width: D.
        head_depth: H.
    """
    factor = tested / trained
    scalings: dict[str, Any] = {}
    if factor > 1:
        scalings = {
            "rotary-linear": lambda: positions.linear_scaling(factor),
            "rotary-ntk": lambda: positions.ntk_scaling(factor),
            "rotary-yarn": lambda: positions.yarn_scaling(factor, trained),
        }

    def options(index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"mask": aj.masks.causal()}
        if scheme == "log-n":
            base = aj.scores.scaled_dot()
            found["score"] = aj.scores.log_length(base, 1 / math.log(trained))
        elif scheme.startswith("rotary"):
            scaling = scalings[scheme]() if scheme in scalings else None
            found["positions"] = nnx.rotary(scaling=scaling)
        elif scheme == "t5":
            found["positions"] = nnx.relative_bias(bidirectional=False)
        elif scheme in ("alibi", "shaw"):
            found["positions"] = scheme
        elif scheme == "transformer-xl":
            key = jax.random.fold_in(jax.random.key(11), index)
            weight = jax.random.normal(key, (width, head_depth)) * width**-0.5
            nothing = jnp.zeros(head_depth)
            found["positions"] = positions.transformer_xl(weight, nothing, nothing)
        return found

    return options
