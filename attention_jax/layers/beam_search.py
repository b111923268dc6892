"""Beam search: keeps the most likely partial sequences and the model's state of each.

Beams are the first axis of a model's state, before the batch axes, so that masks and lengths of the
batch broadcast over them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF
from attention_jax.layers.sampling import Step, is_end


class Beams(NamedTuple):
    """The state of the search; M beams.

    Attributes:
        index: Number of tokens generated so far.
        token: The last token of each live beam, `[M, *B]`.
        state: The model's state, beams first.
        made: The live beams' tokens, `[*B, M, L]`.
        total: Their log-probabilities, `[*B, M]`, in descending order.
        ended: The best finished sequences, `[*B, M, L]`.
        scores: Their scores, `[*B, M]`; -inf for unused entries.
    """

    index: Array
    token: Array
    state: Any
    made: Array
    total: Array
    ended: Array
    scores: Array


def search(
    step: Step,
    first: Int[Array, " M *B"],
    state: Any,
    move: Callable[[Any, Array], Any],
    *,
    length: int,
    eos: Any,
    pad: Any,
    length_penalty: Any,
) -> tuple[Int[Array, "*B M L"], Float[Array, "*B M"]]:
    """The most likely sequences found, best first.

        score(y) = log p(y) / ((5 + |y|) / 6)^α

    The search stops early when no live beam can exceed the lowest score of M finished sequences.

    Args:
        step: The model, for tokens `[M, *B]`.
        first: The token before the first generated one.
        state: The model's state before it, beams first, all equal.
        move: `move(state, order [M, *B])`: beam m's state becomes that of beam order[m].
        length: L, the maximum number of tokens.
        eos: End ids `[E]`: any of them ends a sequence, and is part of it.
        pad: The id after the end.
        length_penalty: α; if it is negative, scores are NaN.

    Returns:
        Tokens and scores; a sequence that reaches L without an end id is ranked as it is.

    References:
        Wu et al. 2016, "Google's Neural Machine Translation System", arXiv:1609.08144, eq. 14.
    """
    beams, batch = first.shape[0], first.shape[1:]

    def penalty(count: Any) -> Array:
        return ((5.0 + jnp.asarray(count, jnp.float32)) / 6.0) ** length_penalty

    def promising(now: Beams) -> Array:
        # Log-probabilities never increase, and the longest sequence has the largest divisor.
        hope = now.total[..., 0] / penalty(length)
        return (now.index < length) & jnp.any(hope > now.scores[..., -1])

    def extend(now: Beams) -> Beams:
        logits, state = step(now.token, now.state)
        logits = jnp.moveaxis(logits, 0, -2).astype(jnp.float32)
        vocab = logits.shape[-1]
        total = now.total[..., None] + jax.nn.log_softmax(logits, axis=-1)
        # At most `beams` of these end with each end id, so at least `beams` others remain.
        many = min((1 + eos.size) * beams, beams * vocab)
        total, flat = jax.lax.top_k(total.reshape(*batch, beams * vocab), many)
        parent, token = flat // vocab, (flat % vocab).astype(jnp.int32)
        made = jnp.take_along_axis(now.made, parent[..., None], axis=-2)
        made = jax.lax.dynamic_update_slice_in_dim(made, token[..., None], now.index, axis=-1)
        ends = is_end(token, eos)
        scores = jnp.where(ends, total / penalty(now.index + 1), NEG_INF)
        ended, scores = _best(
            jnp.concatenate([now.ended, made], axis=-2),
            jnp.concatenate([now.scores, scores], axis=-1),
            beams,
        )
        total, live = jax.lax.top_k(jnp.where(ends, NEG_INF, total), beams)
        parent, token = (jnp.take_along_axis(x, live, axis=-1) for x in (parent, token))
        return Beams(
            index=now.index + 1,
            token=jnp.moveaxis(token, -1, 0),
            state=move(state, jnp.moveaxis(parent, -1, 0)),
            made=jnp.take_along_axis(made, live[..., None], axis=-2),
            total=total,
            ended=ended,
            scores=scores,
        )

    nothing = jnp.full((*batch, beams), NEG_INF)
    empty = jnp.full((*batch, beams, length), pad, jnp.int32)
    # All beams are equal at first: only one of them counts.
    alone = nothing.at[..., 0].set(0.0)
    start = Beams(jnp.zeros((), jnp.int32), first, state, empty, alone, empty, nothing)
    end = jax.lax.while_loop(promising, extend, start)
    made, scores = _best(
        jnp.concatenate([end.ended, end.made], axis=-2),
        jnp.concatenate([end.scores, end.total / penalty(end.index)], axis=-1),
        beams,
    )
    # The early stop requires a divisor that does not decrease with the length.
    return made, jnp.where(length_penalty >= 0, scores, jnp.nan)


def _best(made: Array, scores: Array, count: int) -> tuple[Array, Array]:
    """The `count` sequences with the best scores, best first."""
    scores, which = jax.lax.top_k(scores, count)
    return jnp.take_along_axis(made, which[..., None], axis=-2), scores
