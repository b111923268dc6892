"""The decoder-only Transformer: from tokens to logits of the next one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
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
from attention_jax._modules.recipes import Initializer
from attention_jax._modules.settings import check_settings
from attention_jax.nnx.embedding import absolute
from attention_jax.nnx.parts import check_options
from attention_jax.nnx.places import AnyPositions
from attention_jax.nnx.randomness import AnyRngs, Dropout
from attention_jax.nnx.scores import AnyScore
from attention_jax.nnx.stacks import TransformerEncoder


class TransformerLM(nnx.Module):
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
        score: The score, as in `MultiHeadAttention`.
        norm: "pre", or "post".
        mask: A mask that holds besides the causal one, such as a window.
        tie_output: Whether the logits' weights are the embedding's.
        dropout_rate: Probability that an entry is dropped in training, of the embeddings and of
            what every sub-layer adds, in [0, 1).
        deterministic: Whether to leave dropout out, unless the call says otherwise.
        dtype: Dtype of the computation; None follows the parameters.
        param_dtype: Dtype of the parameters.
        embedding_init: Initialiser of the embedding; None is normal with variance 1/D.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: `scan_layers` and `remat` as in `TransformerEncoder`, and what
            `TransformerEncoderLayer` takes, for every layer.

    Raises:
        ValueError: If sizes do not fit, a rate lies outside [0, 1), or a name is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerLM, greedy_decode
        >>> model = TransformerLM(2, 2, 8, 16, vocab=11, positions="rotary", rngs=nnx.Rngs(0))
        >>> tokens = jnp.ones((3, 5), int)
        >>> model(tokens).shape
        (3, 5, 11)
        >>> greedy_decode(model, tokens, max_length=4).shape
        (3, 4)

    References:
        Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", §3.1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        features: int,
        mlp_features: int,
        vocab: int,
        *,
        positions: AnyPositions = "sinusoidal",
        max_length: int | None = None,
        score: AnyScore = None,
        norm: str = "pre",
        mask: AnyMask = None,
        tie_output: bool = True,
        dropout_rate: float | int = 0.0,
        deterministic: Flag = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_options(self, rngs, options, "scan_layers", "remat")
        self.features = check_count("features", features, 1)
        self.vocab = check_count("vocab", vocab, 1)
        self.dtype = dtype
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        check_settings(embedding_init=embedding_init, tie_output=tie_output, **dtypes)
        init = embedding_init or jax.nn.initializers.normal(features**-0.5)
        self.embedding = nnx.Embed(vocab, features, embedding_init=init, rngs=rngs, **dtypes)
        self.places, scheme = absolute(positions, max_length, features, param_dtype, rngs)
        self.decoder = TransformerEncoder(
            num_layers,
            num_heads,
            features,
            mlp_features,
            norm=norm,
            score=score,
            mask=combine(masks.causal(), mask),
            positions=scheme,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            rngs=rngs,
            **dtypes,
            **options,
        )
        self.dropout = Dropout(
            dropout_rate, name=type(self).__name__, deterministic=deterministic, rngs=rngs
        )
        self.output: nnx.Linear | None = nnx.data(
            None if tie_output else nnx.Linear(features, vocab, use_bias=False, rngs=rngs, **dtypes)
        )

    def __call__(
        self,
        tokens: Target,
        token_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
        query_positions: Any = None,
    ) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each token.

        Args:
            tokens: Ids `[*B, T]`.
            token_mask: Which tokens are real: a boolean array `[*B, T]`, such as `tokens != pad`,
                padded on either side, where a token's position counts the real ones before it; or
                a mask object, such as `masks.padding(lengths)`, which leaves positions alone.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.
            query_positions: ints `[T]` or `[*B, T]`; by default as said.

        Returns:
            `[*B, T, vocab]`.
        """
        at = arguments.standing(query_positions, token_mask, np.shape(tokens))
        mask = arguments.token_mask("token_mask", token_mask, np.shape(tokens))
        check_tokens("tokens", tokens, vocabulary(self.embedding), mask)
        flags = {"deterministic": deterministic, "rngs": rngs}
        x = self._embed(tokens, token_mask, at, **flags)
        return self.logits(self.decoder(x, mask, query_positions=at, **flags))

    def new_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        dtype: Any = None,
        rolling: bool = False,
    ) -> Any:
        """What `with_cache` needs before the first token.

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
            self.places.check_length(length)
        return self.decoder.new_cache(batch, length, dtype=dtype, rolling=rolling)

    def with_cache(
        self,
        tokens: Target,
        cache: Any,
        *,
        valid: Any = None,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T vocab"], Any]:
        """Logits of the token after each of the next tokens: rows of the full pass.

        Args:
            tokens: Ids `[*B, T]` of the T next tokens: a prompt, a part of one, or one token.
            cache: The tokens before, from `new_cache`.
            valid: bool `[*#B, T]`, which tokens are real.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.

        Returns:
            `[*B, T, vocab]` and the next cache.
        """
        check_batch("tokens", tokens, cache, 1)
        flags = {"deterministic": deterministic, "rngs": rngs}
        at = first_cache(cache).next_positions(np.shape(tokens)[-1], valid)
        check_tokens("tokens", tokens, vocabulary(self.embedding), valid)
        x = self._embed(tokens, valid, at, **flags)
        x, cache = self.decoder.with_cache(x, cache, valid=valid, **flags)
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

    def _embed(self, tokens: Any, real: AnyMask, at: Any, **flags: Any) -> Array:
        ids = embeddable(tokens, vocabulary(self.embedding), real)
        x = self.embedding(ids) * self.features**0.5
        return self.dropout(self.places(x, at), **flags)
