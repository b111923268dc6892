"""Positions: where. Encodings of inputs, queries and keys, and biases that are added to scores."""

from attention_jax.positions.alibi import alibi as alibi
from attention_jax.positions.alibi import alibi_slopes as alibi_slopes
from attention_jax.positions.array_bias import array_bias as array_bias
from attention_jax.positions.bias import Bias as Bias
from attention_jax.positions.learned import learned as learned
from attention_jax.positions.relative import relative_bias as relative_bias
from attention_jax.positions.rotary import rotary as rotary
from attention_jax.positions.scaling import linear_scaling as linear_scaling
from attention_jax.positions.scaling import ntk_scaling as ntk_scaling
from attention_jax.positions.scaling import yarn_scaling as yarn_scaling
from attention_jax.positions.shaw import shaw as shaw
from attention_jax.positions.sinusoidal import sinusoidal as sinusoidal
from attention_jax.positions.transformer_xl import transformer_xl as transformer_xl
