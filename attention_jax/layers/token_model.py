"""The base of the token models: embeddings, absolute positions and logits."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax.layers.arguments import AnyMask, embeddable, vocabulary
from attention_jax.layers.body import settings
from attention_jax.layers.construction import Construction
from attention_jax.layers.dropout import Dropout
from attention_jax.layers.embedding import AbsolutePositions, absolute
from attention_jax.layers.position_recipes import AnyPositions
from attention_jax.layers.recipes import KERNEL_INIT, Initializer
from attention_jax.layers.remat import Remat, checkpoint_policy
from attention_jax.layers.training import Flag
from attention_jax.layers.transformer_layer import TransformerSettings


@settings
class TokenModel(TransformerSettings):
    """A model whose inputs are token ids and whose outputs are logits.

    Args:
        num_layers: The number of layers of a stack.
        num_heads: N, the number of heads.
        features: D, the model's width.
        mlp_features: Width of the networks' hidden layers.
        positions: "sinusoidal" as in the original, or "learned", added to the embeddings; or a
            scheme of self-attention, as in `MultiHeadAttention`; None is no positions.
        max_length: The number of learned positions; only for those.
        tie_output: Whether the logits' weights are the target embedding's, as in the original;
            otherwise they are a separate layer.
        dropout_rate: Probability that an entry is dropped in training, of the embeddings and of
            every sub-layer's output, in [0, 1).
        embedding_init: Initialiser of the embeddings; None is normal with variance 1/D.
        scan_layers: As in `TransformerEncoder`.
        remat: As in `TransformerEncoder`.
    """

    num_layers: int
    num_heads: int
    features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    positions: AnyPositions = "sinusoidal"
    max_length: int | None = None
    tie_output: bool = True
    embedding_init: Initializer | None = None
    scan_layers: bool = False
    remat: Remat = False

    _counts = ("num_layers", "features", "mlp_features")
    _arguments: ClassVar = {
        "deterministic": "Whether to disable dropout; overrides the constructor's flag.",
        "query_positions": "ints `[T]` or `[*B, T]`, the positions of the tokens; by default as in "
        "the class.",
    }

    def _check(self, given: Any) -> None:
        super()._check(given)
        absolute(given.positions, given.max_length)
        checkpoint_policy(given.remat)

    def _build_embedding(self, make: Construction, vocab: int) -> Any:
        init = make.given.embedding_init or jax.nn.initializers.normal(self.features**-0.5)
        return make.embed(vocab, self.features, init)

    def _build_positions(self, make: Construction) -> None:
        kind, _ = absolute(make.given.positions, make.given.max_length)
        self.places = make.layer(AbsolutePositions, kind=kind)

    def _build_ends(self, make: Construction, vocab: int) -> None:
        name, rate = type(self).__name__, make.given.dropout_rate
        self.dropout = make.layer(Dropout, rate=rate, layer=name)
        plain = {"use_bias": False, "kernel_init": KERNEL_INIT, "precision": None}
        tied = make.given.tie_output
        self.output = None if tied else make.dense(self.features, vocab, **plain)

    def _build_stack(self, make: Construction, stack: Any, **options: Any) -> Any:
        _, scheme = absolute(make.given.positions, make.given.max_length)
        return make.layer(stack, in_features=self.features, positions=scheme, **options)

    def _embed(
        self, embedding: Any, ids: Any, real: AnyMask, at: Any, deterministic: Flag, random: Any
    ) -> Array:
        x = embedding(embeddable(ids, vocabulary(embedding), real)) * self.features**0.5
        return self.dropout(self.places(x, at), deterministic=deterministic, **random)

    def _logits(self, embedding: Any, states: Any) -> Array:
        states = jnp.asarray(states)
        return embedding.attend(states) if self.output is None else self.output(states)
