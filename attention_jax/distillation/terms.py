"""What one pair of probabilities adds to a divergence, and how that depends on each of them.

    kl              p (ln p - ln q)                       Kullback-Leibler, teacher p, student q
    reverse_kl      q (ln q - ln p)
    cross_entropy   -p ln q
    js              p/2 (ln p - ln m) + q/2 (ln q - ln m),  m = (p + q) / 2

Everything is made of logarithms, so that a probability too small for its dtype still has one. A
probability of 0 has the logarithm -inf; the term is 0 where the weight in front is 0, and +inf, not
NaN, where only the weight behind is.

References:
    Kullback, Leibler 1951, "On Information and Sufficiency".
    Lin 1991, "Divergence Measures Based on the Shannon Entropy", eq. 3.2 (js).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.numerics import NEG_INF
from attention_jax._modules.arguments import check_choice

KINDS = ("kl", "reverse_kl", "js", "cross_entropy")


class Terms(NamedTuple):
    """The terms of a block, and their derivatives by ln p and by ln q; all of one shape.

    Derivatives are finite also where a term is not.
    """

    value: Array
    by_log_p: Array
    by_log_q: Array


def check_kind(kind: str) -> str:
    """`kind`, if it is one of the four."""
    return check_choice("kind", kind, *KINDS)


def terms(kind: str, log_p: Array, log_q: Array) -> Terms:
    """The terms of a divergence, entry by entry.

    Args:
        kind: one of `KINDS`.
        log_p: the teacher's log-probabilities, -inf for 0.
        log_q: the student's.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # A NaN is no -inf: what is seen and not a number stays loud.
    p_none, q_none = log_p == NEG_INF, log_q == NEG_INF
    log_p, log_q = jnp.where(p_none, 0, log_p), jnp.where(q_none, 0, log_q)
    if kind == "kl":
        apart = jnp.where(p_none | q_none, 0, log_p - log_q)
        value = _infinite_where(p * (log_p - log_q), (p > 0) & q_none)
        return Terms(value, jnp.where(p_none | q_none, 0, p * (apart + 1)), -p)
    if kind == "cross_entropy":
        return Terms(_infinite_where(-p * log_q, (p > 0) & q_none), -p * log_q, -p)
    if kind == "reverse_kl":
        apart = jnp.where(p_none | q_none, 0, log_q - log_p)
        value = _infinite_where(q * (log_q - log_p), (q > 0) & p_none)
        by_log_q = jnp.where(p_none | q_none, 0, q * (apart + 1))
        return Terms(value, jnp.where(p_none, 0, -q), by_log_q)
    both = jnp.logaddexp(log_p, log_q)
    log_m = jnp.where(p_none, log_q, jnp.where(q_none, log_p, both)) - math.log(2)
    by_p = jnp.where(p_none, 0, p * (log_p - log_m) / 2)
    by_q = jnp.where(q_none, 0, q * (log_q - log_m) / 2)
    return Terms(by_p + by_q, by_p, by_q)


def _infinite_where(value: Array, infinite: Array) -> Array:
    return jnp.where(infinite, jnp.inf, value)


def log_of(probability: Array) -> Array:
    """The logarithm, -inf for 0, with gradient 0 there."""
    none = probability == 0
    return jnp.where(none, NEG_INF, jnp.log(jnp.where(none, 1, probability)))
