"""Teaching a small model what a large one knows: its logits, its states, where it looks.

    loss = hard labels + λ · logit_distillation + μ · mean of attention_divergence

Teachers come first among the arguments, and get no gradient unless asked.
"""

from attention_jax.distillation.divergence import attention_divergence as attention_divergence
from attention_jax.distillation.divergence import divergence as divergence
from attention_jax.distillation.outputs import hidden_state_transfer as hidden_state_transfer
from attention_jax.distillation.outputs import logit_distillation as logit_distillation
from attention_jax.distillation.outputs import value_relation as value_relation
