"""Scores of queries and keys: functions on arrays, and the score objects built on them."""

from attention_jax.scores.additive import additive as additive
from attention_jax.scores.additive import additive_score as additive_score
from attention_jax.scores.additive import concat as concat
from attention_jax.scores.additive import concat_score as concat_score
from attention_jax.scores.modifiers import clip as clip
from attention_jax.scores.modifiers import log_length as log_length
from attention_jax.scores.modifiers import soft_cap as soft_cap
from attention_jax.scores.modifiers import temperature as temperature
from attention_jax.scores.score import Score as Score
from attention_jax.scores.similarity import cosine as cosine
from attention_jax.scores.similarity import cosine_score as cosine_score
from attention_jax.scores.similarity import custom as custom
from attention_jax.scores.similarity import dot as dot
from attention_jax.scores.similarity import dot_score as dot_score
from attention_jax.scores.similarity import general as general
from attention_jax.scores.similarity import general_score as general_score
from attention_jax.scores.similarity import scaled_dot as scaled_dot
from attention_jax.scores.similarity import scaled_dot_score as scaled_dot_score
