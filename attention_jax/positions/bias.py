"""What a bias is: the third of attention's four choices, where.

    logits(t, s) = score(q_t, k_s) + bias(t, s)

A bias is a term of the logits like a score, evaluated block by block from positions, so that none
of them ever builds a [T, S] array. A new bias is one class with `block` (see
`attention_jax._core.term`).
"""

from attention_jax._core.term import ArrayBias as ArrayBias
from attention_jax._core.term import Term


class Bias(Term):
    """A bias object: added to a score by `score + bias` or given as `bias=`."""


def array_bias(array: object) -> ArrayBias:
    """A bias from a floating array, broadcastable to `[*B, N, T, S]`; `bias=array` does the same.

    Args:
        array: floating; it is indexed by array index, and -inf hides a pair.

    Returns:
        A bias object; the array is its parameter.
    """
    return ArrayBias(array)
