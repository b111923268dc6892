"""Auxiliary losses: entropy regularisation and guided alignment."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attention_jax._core.axes import Array
from attention_jax._core.checks import as_array, check_floating
from attention_jax._core.numerics import NEG_INF, widen
from attention_jax.softmax import Stats, masked_softmax


def entropy_regularizer(
    stats: Stats | Mapping[str, Stats],
    *,
    least: float | int = 0.0,
    most: float | int = math.inf,
) -> Float[Array, ""]:
    """Penalty on attention entropies outside of an interval.

        loss = mean over rows of max(0, least - H)² + max(0, H - most)²

    `least` prevents collapse on single keys, `most` prevents uniform weights.

    Args:
        stats: statistics of one attention, or of several by path, as from `attention_stats`; every
            row has the same weight.
        least: lower bound in nats. The entropy of a row is at most ln of its number of visible
            keys, so rows with few keys may not reach the bound.
        most: upper bound in nats.

    Returns:
        A scalar, differentiable; empty rows are left out.

    Raises:
        ValueError: `least` above `most`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jax.random.normal(jax.random.key(0), (5, 1, 4))
        >>> def loss(x):
        ...     _, stats = aj.attend_with_stats(x, x, x)
        ...     return aj.diagnostics.entropy_regularizer(stats, least=1.5)
        >>> bool(loss(x) > 0), jax.grad(loss)(x).shape
        (True, (5, 1, 4))

    References:
        Pereyra et al. 2017, "Regularizing Neural Networks by Penalizing Confident Output
        Distributions", arXiv:1701.06548, eq. 2 (the penalty, there on outputs).
        Zhai et al. 2023, arXiv:2303.06296 (why entropy should not collapse).
    """
    if least > most:
        raise ValueError(f"least {least} must not be above most {most}")
    each = [stats] if isinstance(stats, Stats) else list(stats.values())
    total, count = jnp.float32(0), jnp.float32(0)
    for one in each:
        entropy, visible = widen(one.entropy), one.lse != NEG_INF
        cost = jnp.square(jax.nn.relu(least - entropy))
        if most != math.inf:
            cost = cost + jnp.square(jax.nn.relu(entropy - most))
        total = total + jnp.sum(jnp.where(visible, cost, 0)).astype(jnp.float32)
        count = count + jnp.sum(visible, dtype=jnp.float32)
    return total / jnp.maximum(count, 1)


def guided_alignment(
    weights: Annotated[Any, Float[Array, "*B N T S"]],
    labels: Annotated[Any, Float[Array, "*#B T S"]],
) -> Float[Array, ""]:
    """Cross-entropy of attention weights under given alignments.

        loss = mean over heads and labelled rows of -Σ_s a_ts ln p_ts

    Rows of the labels are normalised to sum 1; a row of zeros is unlabelled and left out.

    Args:
        weights: `[*B, N, T, S]`, of the supervised heads, commonly one.
        labels: alignments, bool or floating `[*B, T, S]`, or `diagonal_labels`.

    Returns:
        A scalar: +inf, with a finite gradient, if a labelled pair has weight 0.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from attention_jax.diagnostics import guided_alignment
        >>> weights = jnp.array([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]])
        >>> gold = jnp.array([[True, False, False], [False, False, False]])
        >>> print(f"{guided_alignment(weights, gold):.4f}")
        0.6931

    References:
        Chen et al. 2016, "Guided Alignment Training for Topic-Aware Neural Machine Translation",
        arXiv:1607.01628, eq. 5.
        Garg et al. 2019, "Jointly Learning to Align and Translate with Transformer Models",
        arXiv:1909.02074, §4.2.
    """
    check_floating("weights", as_array("weights", weights))
    as_array("labels", labels)
    if weights.ndim < 3 or labels.shape[-2:] != weights.shape[-2:]:
        raise ValueError(
            f"labels {list(labels.shape)} must be [*B, T, S] for weights {list(weights.shape)} "
            "[*B, N, T, S]"
        )
    weights = widen(weights)
    gold = jnp.expand_dims(jnp.asarray(labels).astype(weights.dtype), -3)
    if gold.ndim > weights.ndim:
        raise ValueError(
            f"labels {list(labels.shape)} have more axes than weights {list(weights.shape)} allow"
        )
    gold = jnp.broadcast_to(
        gold.reshape((1,) * (weights.ndim - gold.ndim) + gold.shape), weights.shape
    )
    mass = jnp.sum(gold, axis=-1, keepdims=True)
    gold = gold / jnp.where(mass > 0, mass, 1)
    zero = weights == 0
    cost = -gold * jnp.log(jnp.where(zero, 1, weights))
    rows = jnp.sum(jnp.where(zero & (gold > 0), jnp.inf, cost), axis=-1)
    return jnp.sum(rows) / jnp.maximum(jnp.sum(mass > 0, dtype=rows.dtype), 1)


def diagonal_labels(
    query_lengths: Annotated[Any, Int[Array, "*B"]],
    key_lengths: Annotated[Any, Int[Array, "*B"]],
    T: int,
    S: int,
    *,
    width: float | int = 0.2,
) -> Float[Array, "*B T S"]:
    """Monotone labels along the diagonal, for `guided_alignment` without alignments.

        a_ts ∝ exp(-(t / (Lq - 1) - s / (Lk - 1))² / (2 width²)),  t < Lq, s < Lk

    Args:
        query_lengths: ints `[*B]`, Lq.
        key_lengths: ints `[*B]`, Lk.
        T: query length.
        S: key length.
        width: standard deviation, as a share of the length.

    Returns:
        `[*B, T, S]`, float32; rows sum to 1, or to 0 beyond the lengths.

    References:
        Tachibana, Uenoyama, Aihara 2018, "Efficiently Trainable Text-to-Speech System Based on Deep
        Convolutional Networks with Guided Attention", arXiv:1710.08969, eq. 12 (its W is one minus
        this, unnormalised).
    """
    if not width > 0:
        raise ValueError(f"width must be positive, got {width}")

    def relative(lengths: Any, size: int) -> tuple[Array, Array]:
        lengths = jnp.asarray(lengths)[..., None]
        index = jnp.arange(size, dtype=jnp.int32).reshape((1,) * (lengths.ndim - 1) + (size,))
        position = index.astype(jnp.float32) / jnp.maximum(lengths - 1, 1).astype(jnp.float32)
        return position, index < lengths.astype(jnp.int32)

    for name, lengths in (("query_lengths", query_lengths), ("key_lengths", key_lengths)):
        if not jnp.issubdtype(jnp.asarray(lengths).dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {jnp.asarray(lengths).dtype}")
    rows, real_rows = relative(query_lengths, T)
    columns, real_columns = relative(key_lengths, S)
    distance = rows[..., :, None] - columns[..., None, :]
    real = real_rows[..., :, None] & real_columns[..., None, :]
    return masked_softmax(-jnp.square(distance) / (2 * width**2), real)
