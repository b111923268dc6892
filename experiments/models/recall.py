"""The model of associative recall: one attention layer between embeddings and a readout.

    memory   (k_1, v_1) ... (k_S, v_S)     all k differ
    query    one of the k_s
    answer   v_s

One attention layer is sufficient and necessary for the task: it is the smallest task that depends
on the scale of a score. Its problems are those of `experiments.data.tasks.recall`.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

import attention_jax as aj
from attention_jax.nnx import MultiHeadAttention
from experiments.core.compiling import call
from experiments.core.train import Task
from experiments.data import tasks
from experiments.data.tasks import Batch


class Recall(nnx.Module):
    """One attention layer between embeddings and a readout.

    A pair is the sum of its key's and its value's vector; entries ~ N(0, 1), so that an unscaled
    dot product starts with the spread that §3.2.1 of Vaswani et al. warns of.

    Args:
        words: vocabulary of keys, and of values.
        width: D, of the vectors.
        depth: H, of the one head.
        scale: the factor of the dot product.
        rngs: stream of the parameters.
        **options: of the attention; ``score`` replaces the dot product.
    """

    def __init__(
        self, words: int, width: int, depth: int, scale: float, *, rngs: nnx.Rngs, **options: Any
    ):
        start = nnx.initializers.normal(1.0)
        self.keys = nnx.Embed(words, width, embedding_init=start, rngs=rngs)
        self.values = nnx.Embed(words, width, embedding_init=start, rngs=rngs)
        options = {"score": aj.scores.scaled_dot(scale), **options}
        self.attention = MultiHeadAttention(1, width, qkv_features=depth, rngs=rngs, **options)
        self.readout = nnx.Linear(width, words, rngs=rngs)

    def __call__(
        self, keys: Int[Array, "B S"], values: Int[Array, "B S"], asked: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T words"], aj.Stats]:
        """Return logits over the values, and the attention's statistics ``[B, N, T]``."""
        memory = self.keys(keys) + self.values(values)
        out, stats = self.attention.with_stats(self.keys(asked), memory)
        return self.readout(out), stats


def loss(model: Recall, batch: Batch, key: Array) -> Array:
    """Return the mean cross-entropy of the answers, in nats."""
    del key
    logits, _ = model(batch["keys"], batch["values"], batch["asked"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["answers"]).mean()


def observe(model: Recall, batch: Batch) -> dict[str, float]:
    """Return held-out loss, share of right answers, entropy / ln S, and the largest logit."""
    return {name: float(value) for name, value in call(_observed, model, batch).items()}


def _observed(model: Recall, batch: Batch) -> dict[str, Array]:
    logits, stats = model(batch["keys"], batch["values"], batch["asked"])
    right = jnp.argmax(logits, -1) == batch["answers"]
    every = optax.softmax_cross_entropy_with_integer_labels(logits, batch["answers"])
    return {
        "valid_loss": every.mean(),
        "accuracy": right.mean(dtype=jnp.float32),
        "entropy": stats.entropy.mean() / math.log(batch["keys"].shape[1]),
        "max_logit": stats.max_logit.max(),
    }


def task(
    title: str, model: Recall, *, seed: int, batch_size: int, pairs: int, queries: int, words: int
) -> Task:
    """Return the task to recall, observed on 256 problems that are held out."""

    def problems(step: int, size: int) -> Batch:
        rng = np.random.default_rng([seed, step])
        return tasks.recall(rng, size=size, pairs=pairs, queries=queries, words=words)

    def batch_at(step: int) -> Batch:
        return problems(step, batch_size)

    held_out = problems(tasks.HELD_OUT, 256)
    return Task(title, model, loss, batch_at, seed, lambda model: dict(observe(model, held_out)))
