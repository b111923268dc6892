"""Attention for JAX: any score, any mask, any bias, in O(T + S) memory.

    out = Σ_s softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) ) · v_s

Shapes in letters: query `[*B, T, N, H]`, key `[*B, S, K, H]`, value `[*B, S, K, V]`, out
`[*B, T, N, V]`. Flax modules live in `attention_jax.nnx`, which is imported by name.
"""

import importlib
import types
from typing import TYPE_CHECKING

from attention_jax import cache as cache
from attention_jax import diagnostics as diagnostics
from attention_jax import distillation as distillation
from attention_jax import heads as heads
from attention_jax import masks as masks
from attention_jax import positions as positions
from attention_jax import scores as scores
from attention_jax import sharding as sharding
from attention_jax import softmax as softmax
from attention_jax import subquadratic as subquadratic
from attention_jax import testing as testing
from attention_jax.attend import attend as attend
from attention_jax.attend import attend_with_stats as attend_with_stats
from attention_jax.attend import attention_weights as attention_weights
from attention_jax.attend import explain as explain
from attention_jax.axial import axial_attention as axial_attention
from attention_jax.plan import Plan as Plan
from attention_jax.shaw import shaw_attention as shaw_attention
from attention_jax.softmax import Stats as Stats

if TYPE_CHECKING:
    from attention_jax import visualize as visualize
else:

    def __getattr__(name: str) -> types.ModuleType:
        """`visualize`, which is imported on first access."""
        if name == "visualize":
            return importlib.import_module("attention_jax.visualize")
        raise AttributeError(f"module 'attention_jax' has no attribute {name!r}")


__version__ = "0.1.0"
