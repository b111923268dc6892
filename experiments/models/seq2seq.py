"""Encoder-decoders that differ in their attention to the source; their loss, statistics, decoding.

The models are a Transformer (Vaswani et al. 2017) or a pair of recurrent networks
(`experiments.models.recurrent`). Without attention (``none``) the decoder uses the mean of the
encoder's states.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from attention_jax.nnx import Transformer, greedy_decode
from experiments.core.compiling import call, prepare
from experiments.data.tokens import BOS, EOS, PAD
from experiments.models.recurrent import Recurrent, greedy

# A name of `attention_jax.nnx`'s scores, or "none".
MECHANISMS = ("none", "dot", "scaled_dot", "additive", "general", "concat", "cosine")
Arrays = dict[str, Any]
Model = Transformer | Recurrent
_SHORT = 32  # tokens


class Observed(NamedTuple):
    """Statistics of a batch of held-out sentences.

    Attributes:
        valid_loss: mean cross-entropy of the target tokens, in nats a token.
        tokens: the number of these.
        entropy: of the decoder's attention to the source, over ln of the number of source tokens: 1
            is uniform, 0 is one token; the mean over layers, heads and target tokens.
        weights: that attention, its mean over layers and heads; row t is the step that predicts
            target token t.
    """

    valid_loss: Float[Array, ""]
    tokens: Float[Array, ""]
    entropy: Float[Array, ""]
    weights: Float[Array, "B T S"]


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model: layers on each side, heads, width D, width of the feed-forward part."""

    layers: int
    heads: int
    features: int
    mlp_features: int
    dropout: float = 0.0


def build(
    mechanism: str,
    size: Size,
    source_vocab: int,
    target_vocab: int,
    *,
    seed: int,
    score_in: str,
    kind: str = "transformer",
    location: str = "global",
) -> Model:
    """Return a fresh model whose attention to the source is ``mechanism``.

    Args:
        mechanism: one of `MECHANISMS`.
        size: the size.
        source_vocab: number of source tokens, special ones included.
        target_vocab: number of target tokens.
        seed: of the parameters.
        score_in: "cross": self-attention is the scaled dot in all models; "all": self-attention has
            the mechanism's score too (with ``none`` it stays the scaled dot).
        kind: "transformer" or "gru".
        location: of a GRU's attention, "global" or "local-p".
    """
    if kind == "gru":
        sizes = size.layers, size.heads, size.features, source_vocab, target_vocab
        rest = {"location": location, "dropout": size.dropout}
        return Recurrent(mechanism, *sizes, rngs=nnx.Rngs(seed), **rest)
    cross: Any = {"cross_attention": "mean"} if mechanism == "none" else {"cross_score": mechanism}
    itself = mechanism if score_in == "all" and mechanism != "none" else "scaled_dot"
    return Transformer(
        size.layers,
        size.heads,
        size.features,
        size.mlp_features,
        source_vocab,
        target_vocab,
        score=itself,
        norm="pre",
        dropout_rate=size.dropout,
        rngs=nnx.Rngs(seed),
        **cross,
    )


def loss(model: Model, batch: Arrays, key: Array) -> Float[Array, ""]:
    """Return the mean cross-entropy of the target tokens in training, in nats a token."""
    logits = model(
        batch["source"],
        batch["target_in"],
        source_mask=batch["source"] != PAD,
        deterministic=False,
        rngs=nnx.Rngs(dropout=key),
    )
    return cross_entropy(logits, batch["target_out"])[0]


def cross_entropy(
    logits: Float[Array, "B T vocab"], labels: Int[Array, "B T"], smoothing: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean over the tokens that are not padding, and their number.

    With ``smoothing`` that share of each label's probability is spread over the vocabulary.
    """
    real, logits = labels != PAD, logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    every = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if smoothing:
        uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        every = (1 - smoothing) * every + smoothing * uniform
    count = jnp.sum(real).astype(every.dtype)
    return jnp.sum(jnp.where(real, every, 0.0)) / jnp.maximum(count, 1), count


def observe(model: Model, batch: Arrays) -> Observed:
    """Return the loss of held-out sentences, and the attention to the source."""
    return call(_observed, model, batch)


def prepare_observe(model: Model, batch: Arrays) -> None:
    """Compile `observe` for batches of this shape."""
    prepare(_observed, model, batch)


def translate(model: Model, source: np.ndarray, *, longest: int) -> Int[np.ndarray, "B L"]:
    """Return the greedy translations of ``source``, at most ``longest`` tokens each."""
    # Every generated token costs a pass over all previous ones: long sentences dominate.
    fast = longest <= _SHORT
    return np.asarray(call(_translated, model, source, longest=longest, fast_compile=fast))


def prepare_translate(model: Model, source: np.ndarray, *, longest: int) -> None:
    """Compile `translate` for sources of this shape."""
    prepare(_translated, model, source, longest=longest, fast_compile=longest <= _SHORT)


def _observed(model: Model, batch: Arrays) -> Observed:
    source, target = batch["source"], batch["target_in"]
    real = source != PAD
    logits = model(source, target, source_mask=real, deterministic=True)
    value, tokens = cross_entropy(logits, batch["target_out"])
    weights = model.cross_attention_weights(source, target, source_mask=real)
    logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
    entropy = jnp.mean(-jnp.sum(weights * logs, axis=-1), axis=(0, 2))
    most = jnp.log(jnp.maximum(jnp.sum(real, axis=-1), 2))[:, None]
    predicted = batch["target_out"] != PAD
    mean = jnp.sum(jnp.where(predicted, entropy / most, 0.0)) / jnp.maximum(tokens, 1)
    return Observed(value, tokens, mean, jnp.mean(weights, axis=(0, 2)))


def _translated(model: Model, source: Array, *, longest: int) -> Array:
    ends = {"bos": BOS, "eos": EOS, "pad": PAD}
    if isinstance(model, Recurrent):
        return greedy(model, source, source != PAD, longest=longest, **ends)
    return greedy_decode(model, source, max_length=longest, source_mask=source != PAD, **ends)


def parameters(model: nnx.Module) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
