"""Knowledge distillation: losses on logits, hidden states, attention weights and value relations.

    loss = cross-entropy + λ · logit_distillation + μ · mean of attention_divergence

The teacher is the first argument, and has no gradient unless `teacher_gradient` is set.
"""

from attention_jax.distillation.divergence import attention_divergence as attention_divergence
from attention_jax.distillation.divergence import divergence as divergence
from attention_jax.distillation.outputs import hidden_state_transfer as hidden_state_transfer
from attention_jax.distillation.outputs import logit_distillation as logit_distillation
from attention_jax.distillation.outputs import value_relation as value_relation
