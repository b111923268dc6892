"""Sub-quadratic attention: linear, low-rank, Nyström, memory-compressed, LSH and routed attention.

`attend` never chooses one of them. Layout, padding, causal order, empty rows, dtypes and non-finite
values are as in `attend`; a mask that a family does not support raises an error.
"""

from attention_jax.subquadratic.features import FeatureMap as FeatureMap
from attention_jax.subquadratic.features import cosine_features as cosine_features
from attention_jax.subquadratic.features import elu_features as elu_features
from attention_jax.subquadratic.features import favor_features as favor_features
from attention_jax.subquadratic.features import relu_features as relu_features
from attention_jax.subquadratic.linear import LinearState as LinearState
from attention_jax.subquadratic.linear import linear_attention as linear_attention
from attention_jax.subquadratic.linear import linear_attention_step as linear_attention_step
from attention_jax.subquadratic.linear import (
    linear_attention_with_state as linear_attention_with_state,
)
from attention_jax.subquadratic.low_rank import low_rank_attention as low_rank_attention
from attention_jax.subquadratic.lsh import lsh_attention as lsh_attention
from attention_jax.subquadratic.memory_compressed import (
    memory_compressed_attention as memory_compressed_attention,
)
from attention_jax.subquadratic.nystrom import nystrom_attention as nystrom_attention
from attention_jax.subquadratic.routed import routed_attention as routed_attention
