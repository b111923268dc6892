"""The uniform average of visible states for NNX."""

from attention_jax.layers import mean
from attention_jax.nnx.layer import Layer, module


@module
class MeanAttention(mean.MeanAttention, Layer):
    """Uniform average for NNX."""
