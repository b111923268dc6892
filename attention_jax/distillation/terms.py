"""The terms of divergences between distributions, and their derivatives.

    kl              p (ln p - ln q)                       Kullback-Leibler, teacher p, student q
    reverse_kl      q (ln q - ln p)
    cross_entropy   -p ln q
    js              p/2 (ln p - ln m) + q/2 (ln q - ln m),  m = (p + q) / 2

Terms are computed from logarithms, which exist for probabilities that underflow. The logarithm of 0
is -inf; a term is 0 if its factor is 0, and +inf, not NaN, if only the other probability is 0.

References:
    Kullback, Leibler 1951, "On Information and Sufficiency".
    Lin 1991, "Divergence Measures Based on the Shannon Entropy", eq. 3.2 (js).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF
from attention_jax.layers.arguments import check_choice

KINDS = ("kl", "reverse_kl", "js", "cross_entropy")


class Terms(NamedTuple):
    """Terms, and their derivatives with respect to ln p and ln q, of the same shape.

    Derivatives are finite even if a term is not.
    """

    value: Array
    by_log_p: Array
    by_log_q: Array


def check_kind(kind: str) -> str:
    """Returns `kind`; raises a ValueError unless it is one of `KINDS`."""
    return check_choice("kind", kind, *KINDS)


def terms(kind: str, log_p: Array, log_q: Array) -> Terms:
    """The terms of a divergence, elementwise.

    Args:
        kind: one of `KINDS`.
        log_p: the teacher's log-probabilities, -inf for 0.
        log_q: the student's log-probabilities.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # NaN is not replaced: it propagates
    p_zero, q_zero = log_p == NEG_INF, log_q == NEG_INF
    log_p, log_q = jnp.where(p_zero, 0, log_p), jnp.where(q_zero, 0, log_q)
    if kind == "kl":
        log_ratio = jnp.where(p_zero | q_zero, 0, log_p - log_q)
        value = _infinite_where(p * (log_p - log_q), (p > 0) & q_zero)
        return Terms(value, jnp.where(p_zero | q_zero, 0, p * (log_ratio + 1)), -p)
    if kind == "cross_entropy":
        return Terms(_infinite_where(-p * log_q, (p > 0) & q_zero), -p * log_q, -p)
    if kind == "reverse_kl":
        log_ratio = jnp.where(p_zero | q_zero, 0, log_q - log_p)
        value = _infinite_where(q * (log_q - log_p), (q > 0) & p_zero)
        by_log_q = jnp.where(p_zero | q_zero, 0, q * (log_ratio + 1))
        return Terms(value, jnp.where(p_zero, 0, -q), by_log_q)
    both = jnp.logaddexp(log_p, log_q)
    log_m = jnp.where(p_zero, log_q, jnp.where(q_zero, log_p, both)) - math.log(2)
    by_p = jnp.where(p_zero, 0, p * (log_p - log_m) / 2)
    by_q = jnp.where(q_zero, 0, q * (log_q - log_m) / 2)
    return Terms(by_p + by_q, by_p, by_q)


def _infinite_where(value: Array, infinite: Array) -> Array:
    return jnp.where(infinite, jnp.inf, value)


def log_of(probability: Array) -> Array:
    """The logarithm, -inf for 0 with gradient 0."""
    zero = probability == 0
    return jnp.where(zero, NEG_INF, jnp.log(jnp.where(zero, 1, probability)))
