"""Flax NNX modules with Flax's names, any score and any mask.

Import them explicitly, `from attention_jax import nnx`: the library does not require Flax.
"""

from attention_jax.layers.initializers import small_init as small_init
from attention_jax.layers.initializers import xavier_init as xavier_init
from attention_jax.layers.position_recipes import alibi as alibi
from attention_jax.layers.position_recipes import relative_bias as relative_bias
from attention_jax.layers.position_recipes import rotary as rotary
from attention_jax.layers.position_recipes import shaw as shaw
from attention_jax.layers.scale_recipes import entropy_scale as entropy_scale
from attention_jax.layers.scale_recipes import learned_scale as learned_scale
from attention_jax.layers.scale_recipes import log_length as log_length
from attention_jax.layers.score_recipes import additive as additive
from attention_jax.layers.score_recipes import concat as concat
from attention_jax.layers.score_recipes import cosine as cosine
from attention_jax.layers.score_recipes import dot as dot
from attention_jax.layers.score_recipes import general as general
from attention_jax.layers.score_recipes import scaled_dot as scaled_dot
from attention_jax.nnx.attention import AdditiveAttention as AdditiveAttention
from attention_jax.nnx.attention import AttentionPooling as AttentionPooling
from attention_jax.nnx.attention import GraphAttention as GraphAttention
from attention_jax.nnx.attention import MeanAttention as MeanAttention
from attention_jax.nnx.attention import MultiHeadAttention as MultiHeadAttention
from attention_jax.nnx.decode import beam_decode as beam_decode
from attention_jax.nnx.decode import greedy_decode as greedy_decode
from attention_jax.nnx.decode import sample_decode as sample_decode
from attention_jax.nnx.interop import attention_fn as attention_fn
from attention_jax.nnx.pruning import merge_similar_heads as merge_similar_heads
from attention_jax.nnx.pruning import prune_heads as prune_heads
from attention_jax.nnx.stacks import FeedForward as FeedForward
from attention_jax.nnx.stacks import TransformerDecoder as TransformerDecoder
from attention_jax.nnx.stacks import TransformerDecoderLayer as TransformerDecoderLayer
from attention_jax.nnx.stacks import TransformerEncoder as TransformerEncoder
from attention_jax.nnx.stacks import TransformerEncoderLayer as TransformerEncoderLayer
from attention_jax.nnx.subquadratic import LinearAttention as LinearAttention
from attention_jax.nnx.subquadratic import LowRankAttention as LowRankAttention
from attention_jax.nnx.subquadratic import LSHAttention as LSHAttention
from attention_jax.nnx.subquadratic import MemoryCompressedAttention as MemoryCompressedAttention
from attention_jax.nnx.subquadratic import NystromAttention as NystromAttention
from attention_jax.nnx.subquadratic import RoutedAttention as RoutedAttention
from attention_jax.nnx.transformer import Transformer as Transformer
from attention_jax.nnx.transformer import TransformerLM as TransformerLM
