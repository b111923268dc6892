"""Autoregressive generation: the loop of greedy and sampled decoding, and sampling of a token.

A model is a function `step(tokens [*B], state) -> (logits [*B, vocab], state)`; its state is any
pytree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF, is_concrete

Step = Callable[[Array, Any], tuple[Array, Any]]
Choose = Callable[[Array, Array], Array]


def generate(
    step: Step,
    first: Int[Array, "*B"],
    state: Any,
    choose: Choose,
    *,
    length: int,
    eos: Any,
    pad: Any,
) -> Int[Array, "*B L"]:
    """Generates tokens autoregressively, each chosen by `choose`.

    Args:
        step: The model.
        first: The token before the first generated one.
        state: The model's state before it.
        choose: `choose(logits, index) -> token`.
        length: The maximum number of tokens; the loop stops when every sequence has ended.
        eos: Ids `[E]`: any of them ends a sequence, and is part of the result.
        pad: The id after the end.

    Returns:
        int32 ids.
    """
    batch = first.shape
    made = jnp.full((*batch, length), pad, jnp.int32)

    def unfinished(carry: Any) -> Array:
        index, _, _, done, _ = carry
        return (index < length) & ~jnp.all(done)

    def extend(carry: Any) -> Any:
        index, token, state, done, made = carry
        logits, state = step(token, state)
        # Ended sequences still feed chosen tokens: the padding id need not be in the vocabulary.
        token = choose(logits, index).astype(jnp.int32)
        shown = jnp.where(done, pad, token)
        made = jax.lax.dynamic_update_slice_in_dim(made, shown[..., None], index, axis=-1)
        return index + 1, token, state, done | is_end(token, eos), made

    start = (jnp.zeros((), jnp.int32), first, state, jnp.zeros(batch, bool), made)
    return jax.lax.while_loop(unfinished, extend, start)[-1]


def is_end(token: Array, eos: Int[Array, " E"]) -> Array:
    """Which tokens are one of the ids that end a sequence."""
    return jnp.any(token[..., None] == eos.reshape((1,) * token.ndim + eos.shape), axis=-1)


def likeliest(logits: Array, index: Array) -> Array:
    """The token with the largest logit."""
    del index
    return jnp.argmax(logits, axis=-1)


def sampler(key: PRNGKeyArray, temperature: Any, top_k: Any, top_p: Any) -> Choose:
    """A function `choose(logits, index)` that samples from the logits of `shortlist`.

    A temperature of 0, possible only if traced, is the limit: the most likely token.
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    positive = temperature > 0

    def choose(logits: Array, index: Array) -> Array:
        logits = logits.astype(jnp.float32)
        # With a small temperature differences overflow to -inf; the largest logit is 0.
        logits = logits - jnp.max(logits, axis=-1, keepdims=True)
        kept = shortlist(logits, jnp.where(positive, temperature, 1.0), top_k, top_p)
        drawn = jax.random.categorical(jax.random.fold_in(key, index), kept, axis=-1)
        return jnp.where(positive, drawn, likeliest(logits, index))

    return choose


def shortlist(
    logits: Float[Array, "*B vocab"], temperature: Any, top_k: Any, top_p: Any
) -> Float[Array, "*B vocab"]:
    """Logits over the temperature, with -inf for excluded tokens.

    Args:
        logits: Any floating dtype.
        temperature: Above 1 is more varied, below 1 less.
        top_k: Keeps the k most likely tokens, including ties with the last; at least one. None
            keeps all.
        top_p: Keeps the smallest set of most likely tokens whose probabilities, after the
            temperature and among the k, sum to p; at least one. None keeps all.

    Returns:
        float32.

    References:
        Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation", arXiv:1805.04833, §5.4
        (top-k). Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
        arXiv:1904.09751, eq. 2-3 (top-p).
    """
    logits = logits.astype(jnp.float32) / jnp.asarray(temperature, jnp.float32)
    vocab = logits.shape[-1]
    if not is_concrete(top_k):
        last = jnp.clip(top_k, 1, vocab) - 1
        ordered = jnp.sort(logits, axis=-1, descending=True)
        least = jax.lax.dynamic_index_in_dim(ordered, last, axis=-1)
        logits = jnp.where(logits < least, NEG_INF, logits)
    elif top_k is not None and top_k < vocab:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, NEG_INF, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The sum before the first token is 0, so the first is kept for any p.
        below = (before <= 0) | (before < jnp.asarray(top_p, jnp.float32))
        kept = jnp.where(below, ordered, jnp.inf)
        logits = jnp.where(logits < jnp.min(kept, axis=-1, keepdims=True), NEG_INF, logits)
    return logits
