"""Masks: who may look. Pure objects that combine with `&`, `|` and `~`."""

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
