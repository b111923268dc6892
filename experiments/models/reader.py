"""A small Transformer over the symbols of a problem, with logits at each position.

    x_t = embed(first_t) + embed(second_t) + position_t;   logits = W layers(x)

All models of a study have this structure and differ only in the attention of the layers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from attention_jax import positions
from attention_jax.nnx import TransformerEncoderLayer
from experiments.core.compiling import call, prepare
from experiments.core.optim import Recipe
from experiments.core.train import History, Task
from experiments.data.tasks import SYMBOLS, UNSCORED, WORDS, Batch
from experiments.models.seq2seq import parameters

# Options of `TransformerEncoderLayer` for the layer of a number.
Layer = Callable[[int], dict[str, Any]]
HELD_OUT_SIZE = 128
POSITION_EMBEDDINGS = ("none", "sinusoidal", "learned")


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model: layers, heads, width D (the network in a layer is twice as wide)."""

    layers: int = 2
    heads: int = 4
    features: int = 64


class Reader(nnx.Module):
    """Embeddings, layers, a readout.

    Args:
        size: the size.
        layer: the options of each layer.
        position_embedding: added to the embeddings: "none", "sinusoidal" or "learned".
        length: the number of learned positions.
        rngs: stream of the parameters.
    """

    def __init__(
        self, size: Size, layer: Layer, *, position_embedding: str, length: int = 0, rngs: nnx.Rngs
    ) -> None:
        width = size.features
        self.position_embedding = position_embedding
        start = nnx.initializers.normal(1.0)
        self.first = nnx.Embed(SYMBOLS, width, embedding_init=start, rngs=rngs)
        self.second = nnx.Embed(WORDS + 1, width, embedding_init=start, rngs=rngs)
        self.table: nnx.Param | None = nnx.data(None)
        if position_embedding == "learned":
            self.table = nnx.Param(0.5 * jax.random.normal(rngs.params(), (length, width)))
        self.layers = nnx.List(
            TransformerEncoderLayer(
                size.heads, width, 2 * width, norm="pre", rngs=rngs, **layer(index)
            )
            for index in range(size.layers)
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.readout = nnx.Linear(width, WORDS, rngs=rngs)

    def __call__(self, symbols: Int[Array, "B T 2"]) -> Float[Array, "B T words"]:
        """Return logits of the answers, at each position."""
        x = self.first(symbols[..., 0]) + self.second(symbols[..., 1])
        at = jnp.arange(x.shape[1], dtype=jnp.int32)
        if self.position_embedding == "sinusoidal":
            x = x + positions.sinusoidal(at, x.shape[-1])
        elif self.table is not None:
            x = x + positions.learned(self.table[...], at)
        for layer in self.layers:
            x = layer(x)
        return self.readout(self.norm(x))


def loss(model: Reader, batch: Batch, key: Array) -> Array:
    """Return the mean cross-entropy of the answers, in nats."""
    del key
    return _scores(model, batch)["valid_loss"]


def _scores(model: Reader, batch: Batch) -> dict[str, Array]:
    logits = model(jnp.asarray(batch["symbols"]))
    targets = jnp.asarray(batch["targets"])
    asked = targets != UNSCORED
    targets = jnp.where(asked, targets, 0)
    count = jnp.maximum(jnp.sum(asked), 1)
    every = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (jnp.argmax(logits, axis=-1) == targets) & asked
    return {
        "valid_loss": jnp.sum(jnp.where(asked, every, 0.0)) / count,
        "accuracy": jnp.sum(right) / count,
    }


def observe(model: Reader, batch: Batch) -> dict[str, float]:
    """Return held-out loss and the share of right answers."""
    return {name: float(value) for name, value in call(_scores, model, batch).items()}


def prepare_observe(model: Reader, batch: Batch) -> None:
    """Compile `observe` for batches of this shape."""
    prepare(_scores, model, batch)


def task(
    title: str,
    model: Reader,
    batch_at: Callable[[int], Batch],
    held_out: Batch,
    *,
    seed: int,
    besides: Sequence[Callable[[Any], Any]] = (),
) -> Task:
    """Return the task to answer problems, observed on those that are held out."""
    return Task(
        title,
        model,
        loss,
        batch_at,
        seed,
        lambda model: dict(observe(model, held_out)),
        ahead=[batch_at(0)],
        besides=[lambda model: prepare_observe(model, held_out), *besides],
    )


def recipe(steps: int, learning_rate: float) -> Recipe:
    """Return the recipe of the studies."""
    return Recipe.short(steps, learning_rate, observations=10)


def record(model: Reader, history: History) -> dict[str, Any]:
    """Return the stored results of a trained model."""
    last = {name: history.observed[-1][name] for name in ("accuracy", "valid_loss")}
    return {"parameters": parameters(model), **last, **history.record()}
