"""The uniform average of visible states for Linen."""

from attention_jax.layers import mean
from attention_jax.linen.layer import Layer


class MeanAttention(mean.MeanAttention, Layer):
    """Uniform average for Linen."""
