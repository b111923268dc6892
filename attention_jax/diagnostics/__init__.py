"""Looking at a model while it runs, and telling what ails it.

found = capture(model, inputs)     what every attention does
print(diagnose(found))             what is wrong with it, why, and what to change
"""

from attention_jax.diagnostics.capture import Capture as Capture
from attention_jax.diagnostics.capture import capture as capture
from attention_jax.diagnostics.doctor import diagnose as diagnose
from attention_jax.diagnostics.findings import Diagnosis as Diagnosis
from attention_jax.diagnostics.findings import Finding as Finding
from attention_jax.diagnostics.importance import head_importance as head_importance
from attention_jax.diagnostics.importance import silence_heads as silence_heads
from attention_jax.diagnostics.inputs import AttentionInputs as AttentionInputs
from attention_jax.diagnostics.inputs import attention_inputs as attention_inputs
from attention_jax.diagnostics.losses import diagonal_labels as diagonal_labels
from attention_jax.diagnostics.losses import entropy_regularizer as entropy_regularizer
from attention_jax.diagnostics.losses import guided_alignment as guided_alignment
from attention_jax.diagnostics.maps import rollout as rollout
from attention_jax.diagnostics.reading import Reading as Reading
from attention_jax.diagnostics.training import MonitorState as MonitorState
from attention_jax.diagnostics.training import attention_stats as attention_stats
from attention_jax.diagnostics.training import history as history
from attention_jax.diagnostics.training import monitor as monitor
from attention_jax.diagnostics.writers import JsonLines as JsonLines
from attention_jax.diagnostics.writers import TensorBoard as TensorBoard
from attention_jax.diagnostics.writers import read_history as read_history
