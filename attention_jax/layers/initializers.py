"""Initialisers from the literature, for `kernel_init` of any module.

A module passes an initialiser the shape of a projection's flat matrix `[inputs, outputs]`,
independent of its kernel's shape, so that fans are those of the matrix.
"""

import math

import jax

from attention_jax._core.checks import check_count
from attention_jax.layers.recipes import Initializer


def xavier_init() -> Initializer:
    """Xavier's uniform initialiser, `W ~ U(−a, a)` with `a = √(6 / (inputs + outputs))`.

    The original Transformer's code uses it for its kernels.

    Returns:
        An initialiser.

    References:
        Glorot, Bengio 2010, "Understanding the difficulty of training deep feedforward neural
        networks", eq. 16.
    """
    return jax.nn.initializers.xavier_uniform()


def small_init(features: int, num_layers: int | None = None) -> Initializer:
    """A small normal initialiser, `W ~ N(0, 2 / (5 D))`, for every matrix of a model of width D.

    Xavier's variance of the network's matrices, D to 4·D, is used for all matrices. With
    `num_layers` the variance is also divided by 2·L, as in GPT-2 for matrices that end a residual
    branch: pass that initialiser as `out_kernel_init`.

    Args:
        features: D, the model's width.
        num_layers: L, or None.

    Returns:
        An initialiser.

    References:
        Nguyen, Salazar 2019, "Transformers without Tears", arXiv:1910.05895, §2.2 (SmallInit).
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3.
    """
    deviation = math.sqrt(2 / (5 * check_count("features", features, 1)))
    if num_layers is not None:
        deviation /= math.sqrt(2 * check_count("num_layers", num_layers, 1))
    return jax.nn.initializers.normal(deviation)
