"""Attention over several devices: shardings of batch and heads, and sharded sequences."""

from attention_jax.sharding.placement import placement as placement
from attention_jax.sharding.split import attend_split as attend_split
from attention_jax.sharding.split import merge as merge
