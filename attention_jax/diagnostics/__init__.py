"""Diagnostics of attention in a running model.

found = capture(model, inputs)     statistics of every attention
print(diagnose(found))             problems, their likely causes, and remedies
"""

from attention_jax.diagnostics.capture import Capture as Capture
from attention_jax.diagnostics.capture import capture as capture
from attention_jax.diagnostics.diagnose import diagnose as diagnose
from attention_jax.diagnostics.findings import Diagnosis as Diagnosis
from attention_jax.diagnostics.findings import Finding as Finding
from attention_jax.diagnostics.importance import head_importance as head_importance
from attention_jax.diagnostics.importance import mask_heads as mask_heads
from attention_jax.diagnostics.losses import diagonal_labels as diagonal_labels
from attention_jax.diagnostics.losses import entropy_regularizer as entropy_regularizer
from attention_jax.diagnostics.losses import guided_alignment as guided_alignment
from attention_jax.diagnostics.maps import rollout as rollout
from attention_jax.diagnostics.monitor import MonitorState as MonitorState
from attention_jax.diagnostics.monitor import history as history
from attention_jax.diagnostics.monitor import monitor as monitor
from attention_jax.diagnostics.observed import AttentionInputs as AttentionInputs
from attention_jax.diagnostics.observed import attention_inputs as attention_inputs
from attention_jax.diagnostics.observed import attention_stats as attention_stats
from attention_jax.diagnostics.record import AttentionRecord as AttentionRecord
from attention_jax.diagnostics.writers import JsonLines as JsonLines
from attention_jax.diagnostics.writers import TensorBoard as TensorBoard
from attention_jax.diagnostics.writers import read_history as read_history
