"""Looking at a model while it runs, and telling what ails it.

found = capture(model, inputs)     what every attention does
print(diagnose(found))             what is wrong with it, why, and what to change
"""

from attention_jax.diagnostics.capture import Capture as Capture
from attention_jax.diagnostics.capture import capture as capture
from attention_jax.diagnostics.maps import rollout as rollout
from attention_jax.diagnostics.reading import Reading as Reading
