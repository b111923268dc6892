"""Masks: which keys are visible to which queries. Pure objects, combined by `&`, `|` and `~`."""

from attention_jax.masks.block_map import BlockMap as BlockMap
from attention_jax.masks.data import from_array as from_array
from attention_jax.masks.data import padding as padding
from attention_jax.masks.data import segments as segments
from attention_jax.masks.mask import Mask as Mask
from attention_jax.masks.patterns import block_diagonal as block_diagonal
from attention_jax.masks.patterns import causal as causal
from attention_jax.masks.patterns import custom as custom
from attention_jax.masks.patterns import local as local
from attention_jax.masks.patterns import prefix as prefix
from attention_jax.masks.patterns import window as window
from attention_jax.masks.random_blocks import random as random
from attention_jax.masks.sparse import bigbird as bigbird
from attention_jax.masks.sparse import block_local as block_local
from attention_jax.masks.sparse import global_tokens as global_tokens
from attention_jax.masks.sparse import longformer as longformer
from attention_jax.masks.sparse import sparse_fixed as sparse_fixed
from attention_jax.masks.sparse import sparse_strided as sparse_strided
from attention_jax.masks.strides import axial as axial
from attention_jax.masks.strides import dilated as dilated
from attention_jax.masks.strides import strided as strided
from attention_jax.masks.strides import summary_tokens as summary_tokens
