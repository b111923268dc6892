"""Token after token: one loop for greedy and sampled decoding, and how a token is drawn.

Nothing here knows a model. `step(tokens [*B], state) -> (logits [*B, vocab], state)` is all a model
has to offer; its state is any pytree.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, PRNGKeyArray

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._core.numerics import NEG_INF, is_concrete

Step = Callable[[Array, Any], tuple[Array, Any]]
Choose = Callable[[Array, Array], Array]


def walk(
    step: Step,
    first: Int[Array, "*B"],
    state: Any,
    choose: Choose,
    *,
    length: int,
    eos: Any,
    pad: Any,
) -> Int[Array, "*B L"]:
    """The tokens that `choose` takes, one after the other.

    Args:
        step: The model.
        first: What stands before the first token to make.
        state: The model's state before it.
        choose: `choose(logits, index) -> token`.
        length: The most tokens to make; the loop ends as soon as every sequence has its end.
        eos: The id that ends a sequence; it is part of the result.
        pad: What stands behind the end.

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
        token = jnp.where(done, pad, choose(logits, index).astype(jnp.int32))
        made = jax.lax.dynamic_update_slice_in_dim(made, token[..., None], index, axis=-1)
        return index + 1, token, state, done | (token == eos), made

    start = (jnp.zeros((), jnp.int32), first, state, jnp.zeros(batch, bool), made)
    return jax.lax.while_loop(unfinished, extend, start)[-1]


def likeliest(logits: Array, index: Array) -> Array:
    """The token with the largest logit."""
    del index
    return jnp.argmax(logits, axis=-1)


def check_sampling(temperature: Any, top_k: int | None, top_p: Any) -> None:
    """Raises a ValueError where an option of `sampler` is out of range."""
    if is_concrete(temperature) and not temperature > 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; for the likeliest token decode "
            "greedily"
        )
    if top_k is not None:
        check_count("top_k", top_k, 1)
    if top_p is not None and is_concrete(top_p) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")


def sampler(key: PRNGKeyArray, temperature: Any, top_k: int | None, top_p: Any) -> Choose:
    """Draws tokens, `choose(logits, index)`, from what `shortlist` leaves."""

    def choose(logits: Array, index: Array) -> Array:
        kept = shortlist(logits, temperature, top_k, top_p)
        return jax.random.categorical(jax.random.fold_in(key, index), kept, axis=-1)

    return choose


def shortlist(
    logits: Float[Array, "*B vocab"], temperature: Any, top_k: int | None, top_p: Any
) -> Float[Array, "*B vocab"]:
    """Logits over the temperature, with -inf for tokens that are not to be drawn.

    Args:
        logits: Any floating dtype.
        temperature: Above 1 is more varied, below 1 less.
        top_k: Keeps the k likeliest tokens, and those that equal the last of them; None keeps all.
        top_p: Keeps the likeliest tokens up to and with the one at which their probabilities, after
            the temperature and among the k, sum to p; at least one. None keeps all.

    Returns:
        float32.

    References:
        Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation", arXiv:1805.04833, §5.4
        (top-k). Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration",
        arXiv:1904.09751, eq. 2-3 (top-p).
    """
    logits = logits.astype(jnp.float32) / jnp.asarray(temperature, jnp.float32)
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, NEG_INF, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The first has nothing before it, so it is kept whatever p is.
        kept = jnp.where(before < jnp.asarray(top_p, jnp.float32), ordered, jnp.inf)
        logits = jnp.where(logits < jnp.min(kept, axis=-1, keepdims=True), NEG_INF, logits)
    return logits
