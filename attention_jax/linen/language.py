"""The decoder-only Transformer: from tokens to logits of the next one."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attention_jax import masks
from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules import arguments
from attention_jax._modules.arguments import (
    AnyMask,
    Features,
    Target,
    check_tokens,
    combine,
    embeddable,
    vocabulary,
)
from attention_jax._modules.caches import check_batch, first_cache
from attention_jax._modules.flags import Flag
from attention_jax._modules.policy import Remat, checkpoint_policy
from attention_jax._modules.recipes import Initializer
from attention_jax.linen.embedding import AbsolutePositions, absolute, check_length
from attention_jax.linen.parts import Parts
from attention_jax.linen.scores import AnyPositions
from attention_jax.linen.stacks import TransformerEncoder


class TransformerLM(Parts):
    """A language model: causal self-attention and networks, layer on layer.

        x = √D · embed(token) + position;   logits = W_vocab layers(x)

    Row t of the logits is about token t + 1 and depends on tokens 0..t.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        features: D, the model's width.
        mlp_features: Width of the networks' hidden layers.
        vocab: Number of tokens.
        positions: "sinusoidal" or "learned", added to the embeddings; or a scheme of attention,
            as in `MultiHeadAttention`: "rotary", "alibi", `relative_bias(...)`; None is none.
        max_length: How many learned positions there are; for them alone.
        norm: "pre", or "post".
        mask: A mask that holds besides the causal one, such as a window.
        tie_output: Whether the logits' weights are the embedding's.
        embedding_init: Initialiser of the embedding; None is normal with variance 1/D.
        dropout_rate: Probability that an entry is dropped in training, of the embeddings and of
            what every sub-layer adds, in [0, 1).
        scan_layers: As in `TransformerEncoder`; so is `remat`.
        remat: As in `TransformerEncoder`.
        **options: As in `TransformerEncoderLayer`, for every layer.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerLM, greedy_decode
        >>> model = TransformerLM(2, 2, 8, 16, 11, positions="rotary")
        >>> tokens = jnp.ones((3, 5), int)
        >>> variables = model.init(jax.random.key(0), tokens)
        >>> model.apply(variables, tokens).shape
        (3, 5, 11)
        >>> greedy_decode(model, variables, tokens, max_length=4).shape
        (3, 4)

    References:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", §3.1.
    """

    num_layers: int
    num_heads: int
    features: int
    mlp_features: int
    vocab: int
    _: dataclasses.KW_ONLY
    norm: str = "pre"
    tie_output: bool = True
    embedding_init: Initializer | None = None
    positions: AnyPositions = "sinusoidal"
    max_length: int | None = None
    scan_layers: bool = False
    remat: Remat = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "features", "vocab"):
            check_count(name, getattr(self, name), 1)
        _, scheme = absolute(self.positions, self.max_length)
        self._check(self.num_heads, self.features, self.mlp_features, scheme)
        checkpoint_policy(self.remat)
        super().__post_init__()

    def setup(self) -> None:
        """The parts."""
        dtypes = self._take("dtype", "param_dtype")
        init = self.embedding_init or jax.nn.initializers.normal(self.features**-0.5)
        self.embedding = nn.Embed(self.vocab, self.features, embedding_init=init, **dtypes)
        kind, _ = absolute(self.positions, self.max_length)
        self.places = AbsolutePositions(
            kind=kind, **self._take("max_length", "features", "param_dtype")
        )
        self.decoder = self._layers()
        self.dropout = self._dropout()
        self.output = None if self.tie_output else nn.Dense(self.vocab, use_bias=False, **dtypes)

    @nn.nowrap
    def _layers(self, **options: Any) -> TransformerEncoder:
        own = {**self._shared(), **self._take("scan_layers", "remat"), **options}
        own["mask"] = combine(masks.causal(), self.mask)
        own["positions"] = absolute(self.positions, self.max_length)[1]
        sizes = (self.num_layers, self.num_heads, self.features, self.mlp_features)
        return TransformerEncoder(*sizes, **own)

    def __call__(
        self,
        tokens: Target,
        token_mask: AnyMask = None,
        deterministic: Flag = None,
        *,
        query_positions: Any = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each token.

        Args:
            tokens: Ids `[*B, T]`.
            token_mask: Which tokens are real: a boolean array `[*B, T]`, such as `tokens != pad`,
                padded on either side, where a token's position counts the real ones before it; or
                a mask object, such as `masks.padding(lengths)`, which leaves positions alone.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            query_positions: ints `[T]` or `[*B, T]`; by default as said.

        Returns:
            `[*B, T, vocab]`.
        """
        shape = np.shape(tokens)
        at = arguments.standing(query_positions, token_mask, shape)
        mask = arguments.token_mask("token_mask", token_mask, shape)
        check_tokens("tokens", tokens, vocabulary(self.embedding), mask)
        x = self._embed(tokens, token_mask, at, deterministic)
        return self.logits(self.decoder(x, mask, deterministic, query_positions=at))

    @nn.nowrap
    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> Any:
        """What `with_cache` needs before the first token; it needs no variables.

        Args:
            batch: `*B`.
            length: How many tokens there is room for.
            dtype: What keys and values are stored in; None is the layers', or float32.
            rolling: Whether it keeps the latest tokens, as in `MultiHeadAttention.new_cache`.

        Returns:
            Each layer's cache.

        Raises:
            ValueError: If there are fewer learned positions.
        """
        if not rolling:
            check_length(length, self.max_length)
        layers = self._layers(parent=None)
        return layers.new_cache(batch, length, dtype=dtype, rolling=rolling)

    def with_cache(
        self, tokens: Target, cache: Any, *, valid: Any = None, deterministic: Flag = None
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits of the token after each of the next tokens: rows of the full pass.

        Args:
            tokens: Ids `[*B, T]` of the T next tokens: a prompt, a part of one, or one token.
            cache: The tokens before, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.

        Returns:
            `[*B, T, vocab]` and the next cache.
        """
        check_batch("tokens", tokens, cache, 1)
        at = first_cache(cache).next_positions(np.shape(tokens)[-1], valid)
        check_tokens("tokens", tokens, vocabulary(self.embedding), valid)
        x = self._embed(tokens, valid, at, deterministic)
        x, cache = self.decoder.with_cache(x, cache, valid=valid, deterministic=deterministic)
        return self.logits(x), cache

    def logits(self, states: Features) -> Float[Array, "*B T vocab"]:
        """Logits of tokens.

        Args:
            states: The last layer's states `[*B, T, features]`.

        Returns:
            `[*B, T, vocab]`, in the states' dtype.
        """
        if self.output is None:
            return self.embedding.attend(jnp.asarray(states))
        return self.output(jnp.asarray(states))

    def _embed(self, tokens: Any, real: AnyMask, at: Any, deterministic: Flag) -> Array:
        ids = embeddable(tokens, vocabulary(self.embedding), real)
        x = self.embedding(ids) * self.features**0.5
        return self.dropout(self.places(x, at), deterministic=deterministic)
