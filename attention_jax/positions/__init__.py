"""Positions: where. Encodings that are added to inputs, and biases that are added to scores."""

from attention_jax.positions.bias import Bias as Bias
from attention_jax.positions.bias import array_bias as array_bias
from attention_jax.positions.sinusoidal import sinusoidal as sinusoidal
