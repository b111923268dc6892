"""The language model: loss over packed documents, observation, and samples.

    ℓ = mean over targets of −log p(target | tokens before it in its segment);   perplexity = exp ℓ

The model is `attention_jax.nnx.TransformerLM`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from attention_jax import masks
from attention_jax.nnx import TransformerLM, sample_decode
from experiments.core.compiling import call, prepare
from experiments.core.train import Observed, Task
from experiments.data.packed import Batch, Documents
from experiments.data.tokens import BOS, EOS, PAD
from experiments.models.seq2seq import cross_entropy


def logits(model: TransformerLM, batch: Batch, **flags: Any) -> Float[Array, "B T vocab"]:
    """Return the logits of each token's successor; no token attends to another document."""
    within = masks.segments(batch["segments"])
    return model(batch["tokens"], within, query_positions=batch["positions"], **flags)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss in training, in nats a token.

    Attributes:
        smoothing: the share of each target's probability that is spread over the vocabulary.
    """

    smoothing: float = 0.0

    def __call__(self, model: TransformerLM, batch: Batch, key: Array) -> Array:
        """Return the loss of a batch, with dropout."""
        flags = {"deterministic": False, "rngs": nnx.Rngs(dropout=key)}
        return cross_entropy(logits(model, batch, **flags), batch["targets"], self.smoothing)[0]


def task(
    title: str, model: TransformerLM, text: Documents, *, batch_size: int, smoothing: float,
    seed: int,
) -> Task:  # fmt: skip
    """Return the task to predict the tokens of documents, observed on those that are held out."""
    valid = text.valid.batches(batch_size)[:8]
    first = text.train.batch(0, batch_size)
    return Task(
        title,
        model,
        Loss(smoothing),
        lambda step: text.train.batch(step, batch_size),
        seed,
        lambda model: observe(model, valid),
        ahead=[first],
        besides=[lambda model: prepare(_scored, model, valid[0])],
        tokens=lambda batch: batch_size * text.train.length,
    )


def observe(model: TransformerLM, batches: Sequence[Batch]) -> Observed:
    """Return the loss of some batches, in nats a token."""
    pairs = [call(_scored, model, batch) for batch in batches]
    losses, counts = (np.array([float(x) for x in values]) for values in zip(*pairs, strict=True))
    return {"valid_loss": float(np.average(losses, weights=counts))}


def _scored(model: TransformerLM, batch: Batch) -> tuple[Array, Array]:
    return cross_entropy(logits(model, batch, deterministic=True), batch["targets"])


def perplexity(loss: float | None) -> float | None:
    """Return exp of a loss, infinity if that overflows."""
    return None if loss is None else math.exp(loss) if loss < 700 else math.inf


def samples(model: TransformerLM, seed: int, *, count: int, longest: int) -> list[list[int]]:
    """Return sampled texts, as ids, with top-p 0.9."""
    begin = np.full((count, 1), BOS, np.int32)
    key = jax.random.key_data(jax.random.key(seed))
    return np.asarray(call(_sampled, model, begin, np.asarray(key), longest=longest)).tolist()


def _sampled(model: TransformerLM, begin: Array, key: Array, *, longest: int) -> Array:
    drawn = {"max_length": longest, "top_p": 0.9, "eos": EOS, "pad": PAD}
    return sample_decode(model, begin, jax.random.wrap_key_data(key), **drawn)
