"""A recurrent encoder and decoder with attention.

    encoder    h_s = [GRU→(x_1 … x_s); GRU←(x_S … x_s)]
    Bahdanau   c_t = attend(s_{t-1}, h),  s_t = GRU(s_{t-1}, [y_{t-1}; c_t])   (additive)
    Luong      s_t = GRU(s_{t-1}, y_{t-1}),  c_t = attend(s_t, h)              (every other score)
    both       logits = W tanh(W_c [s_t; c_t; y_{t-1}])

Without attention, c_t is the mean of the encoder's states. With ``local-p`` a position
p_t = S · sigmoid(v · tanh(W s_t)) is predicted, and only keys near it are visible.

References:
    Bahdanau et al. 2014, arXiv:1409.0473, §3 and appendix A.
    Luong et al. 2015, arXiv:1508.04025, §3.1 (global), §3.2 (local-p).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import attention_jax as aj

_DEVIATION = 5.0  # σ of local-p: keys within 2 σ of p_t are visible


class State(NamedTuple):
    """The decoder's state: that of each layer, from the lowest, `[B, D]`."""

    layers: tuple[Array, ...]

    @property
    def top(self) -> Array:
        """The state of the last layer, which attends and predicts."""
        return self.layers[-1]


class CrossAttention(nnx.Module):
    """Attention of a decoder's state to the encoder's states, without projections.

    Args:
        mechanism: a score's name, or "none" for the mean.
        features: D, the width of both.
        heads: N, into which D is split; the articles have one.
        location: "global" or "local-p".
        rngs: of the parameters.
    """

    def __init__(
        self, mechanism: str, features: int, heads: int, location: str, *, rngs: nnx.Rngs
    ) -> None:
        self.mechanism, self.heads, self.location = mechanism, heads, location
        depth = features // heads
        init = nnx.initializers.lecun_normal()

        def draw(*shape: int) -> nnx.Param:
            return nnx.Param(init(rngs.params(), shape, jnp.float32))

        shapes = {
            "additive": {"w_query": (depth, depth), "w_key": (depth, depth), "v": (depth, 1)},
            "general": {"weight": (depth, depth)},
            "concat": {"weight": (2 * depth, depth), "v": (depth, 1)},
        }
        own = {name: draw(*shape) for name, shape in shapes.get(mechanism, {}).items()}
        self.parameters = nnx.data(own)
        self.place = nnx.data(None)
        if location == "local-p":
            self.place = nnx.data(
                (nnx.Linear(features, features, rngs=rngs), nnx.Linear(features, 1, rngs=rngs))
            )

    def score(self) -> aj.scores.Score:
        """The score object, with the current parameters."""
        values = {n: p[...][:, 0] if n == "v" else p[...] for n, p in self.parameters.items()}
        return getattr(aj.scores, self.mechanism)(**values)

    def __call__(
        self, state: Float[Array, "B D"], memory: Float[Array, "B S D"], real: Any
    ) -> tuple[Float[Array, "B D"], Float[Array, "B N S"]]:
        """The context and the weights."""
        mask = real[:, None, None, :]
        if self.mechanism == "none":
            share = real / jnp.maximum(jnp.sum(real, axis=-1, keepdims=True), 1)
            share = share.astype(memory.dtype)
            return jnp.einsum("bs,bsd->bd", share, memory), share[:, None]
        query, key = (aj.heads.split_heads(x, self.heads) for x in (state[:, None], memory))
        how: dict[str, Any] = {"score": self.score(), "mask": mask}
        if self.place is not None:
            hidden, out = self.place
            length = jnp.sum(real, axis=-1, keepdims=True).astype(memory.dtype)
            centre = length * jax.nn.sigmoid(out(jnp.tanh(hidden(state))))
            away = jnp.arange(memory.shape[1], dtype=memory.dtype) - centre
            # Luong's weights are multiplied by the Gaussian after the softmax; as a bias it comes
            # before, so that they still sum to 1.
            how["bias"] = (-0.5 * jnp.square(away / _DEVIATION))[:, None, None, :]
            near = jnp.abs(away) <= 2 * _DEVIATION
            # Every centre inside a sentence has a word within 2 σ.
            how["mask"] = mask & near[:, None, None, :]
        context = aj.heads.merge_heads(aj.attend(query, key, key, **how))[:, 0]
        return context, aj.attention_weights(query, key, **how)[:, :, 0]


class Recurrent(nnx.Module):
    """The encoder-decoder, with the methods of a Transformer that the experiments use.

    Args:
        mechanism: a score's name, or "none"; see `CrossAttention`.
        layers: of the encoder, and of the decoder.
        heads: N.
        features: D, of states and embeddings.
        source_vocab: number of source tokens.
        target_vocab: number of target tokens.
        location: "global" or "local-p".
        dropout: rate, of embeddings and of the output layer's input.
        rngs: of the parameters.
    """

    def __init__(
        self,
        mechanism: str,
        layers: int,
        heads: int,
        features: int,
        source_vocab: int,
        target_vocab: int,
        *,
        location: str,
        dropout: float,
        rngs: nnx.Rngs,
    ) -> None:
        half = features // 2
        self.early = mechanism == "additive"
        self.source_embedding = nnx.Embed(source_vocab, features, rngs=rngs)
        self.target_embedding = nnx.Embed(target_vocab, features, rngs=rngs)
        self.encoder = nnx.List(
            [
                nnx.List([nnx.RNN(nnx.GRUCell(features, half, rngs=rngs)) for _ in range(2)])
                for _ in range(layers)
            ]
        )
        widths = [features * (2 if self.early else 1), *[features] * (layers - 1)]
        self.decoder = nnx.List([nnx.GRUCell(width, features, rngs=rngs) for width in widths])
        self.begin = nnx.Linear(half, layers * features, rngs=rngs)
        self.cross_attention = CrossAttention(mechanism, features, heads, location, rngs=rngs)
        self.combine = nnx.Linear(3 * features, features, rngs=rngs)
        self.output = nnx.Linear(features, target_vocab, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)

    def encode(
        self, source: Int[Array, "B S"], real: Any, **flags: Any
    ) -> tuple[Float[Array, "B S D"], State]:
        """The encoder's states and the decoder's initial state."""
        x = self.dropout(self.source_embedding(source), **flags)
        lengths = jnp.sum(real, axis=-1)
        backward = x
        for pair in self.encoder:
            both = []
            for rnn, backwards in zip(pair, (False, True), strict=True):
                start = jnp.zeros((x.shape[0], x.shape[-1] // 2), x.dtype)
                both.append(
                    rnn(
                        x, initial_carry=start, seq_lengths=lengths, reverse=backwards,
                        keep_order=True,
                    )
                )  # fmt: skip
            backward = both[1][:, 0]  # its last state
            x = jnp.concatenate(both, axis=-1)
        begun = jnp.split(jnp.tanh(self.begin(backward)), len(self.decoder), axis=-1)
        return x, State(tuple(begun))

    def step(
        self, state: State, word: Float[Array, "B D"], memory: Array, real: Any
    ) -> tuple[State, Float[Array, "B D3"], Float[Array, "B N S"]]:
        """The new state, the input of the output layer, and the weights."""
        context: Any = None
        weights: Any = None
        below = word
        if self.early:
            context, weights = self.cross_attention(state.top, memory, real)
            below = jnp.concatenate([word, context], axis=-1)
        new = []
        for cell, old in zip(self.decoder, state.layers, strict=True):
            below = cell(old, below)[1]
            new.append(below)
        if context is None:
            context, weights = self.cross_attention(below, memory, real)
        read = jnp.concatenate([below, context, word], axis=-1)
        return State(tuple(new)), read, weights

    def logits(self, read: Float[Array, "... D3"]) -> Float[Array, "... vocab"]:
        """Logits of the next word."""
        return self.output(jnp.tanh(self.combine(read)))

    def _read(
        self, source: Array, target: Array, real: Any, **flags: Any
    ) -> tuple[Float[Array, "B T D3"], Float[Array, "B N T S"]]:
        memory, state = self.encode(source, real, **flags)
        words = self.dropout(self.target_embedding(target), **flags)

        def step(state: State, word: Array) -> tuple[State, tuple[Array, Array]]:
            state, read, weights = self.step(state, word, memory, real)
            return state, (read, weights)

        _, (read, weights) = jax.lax.scan(step, state, jnp.swapaxes(words, 0, 1))
        read = self.dropout(jnp.swapaxes(read, 0, 1), **flags)
        return read, jnp.moveaxis(weights, 0, 2)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        source_mask: Any,
        *,
        deterministic: bool,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the next token at each target position."""
        flags = {"deterministic": deterministic, "rngs": rngs}
        return self.logits(self._read(source, target, source_mask, **flags)[0])

    def cross_attention_weights(
        self, source: Int[Array, "B S"], target: Int[Array, "B T"], source_mask: Any
    ) -> Float[Array, "1 B N T S"]:
        """The weights of the step that predicts the token after each target token."""
        return self._read(source, target, source_mask, deterministic=True)[1][None]


def greedy(
    model: Recurrent, source: Int[Array, "B S"], real: Any, *, bos: int, eos: int, pad: int,
    longest: int,
) -> Int[Array, "B L"]:  # fmt: skip
    """Greedy decoding: the most likely token at each step."""
    memory, state = model.encode(source, real, deterministic=True)
    size = source.shape[:1]

    def step(carry: Any, _: Any) -> tuple[Any, Array]:
        state, token, ended = carry
        state, read, _ = model.step(state, model.target_embedding(token), memory, real)
        token = jnp.argmax(model.logits(read), axis=-1).astype(jnp.int32)
        token = jnp.where(ended, jnp.int32(pad), token)
        return (state, token, ended | (token == eos)), token

    begun = state, jnp.full(size, bos, jnp.int32), jnp.zeros(size, bool)
    return jnp.swapaxes(jax.lax.scan(step, begun, None, length=longest)[1], 0, 1)
