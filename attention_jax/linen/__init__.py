"""Flax Linen modules over the engine: Flax's names, any score, any mask.

Imported by name, `from attention_jax import linen`: the library itself does not need Flax.
"""

from attention_jax._modules.factories import additive as additive
from attention_jax._modules.factories import concat as concat
from attention_jax._modules.factories import cosine as cosine
from attention_jax._modules.factories import dot as dot
from attention_jax._modules.factories import general as general
from attention_jax._modules.factories import scaled_dot as scaled_dot
from attention_jax.linen.attention import MultiHeadAttention as MultiHeadAttention
from attention_jax.linen.interop import attention_fn as attention_fn
