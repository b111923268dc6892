"""The GPU cases: bfloat16, lengths up to 32768, this library's kernel against cuDNN and XLA."""

import jax
import jax.numpy as jnp

import attention_jax as aj
from experiments.bench.contest import Case, Ratio, compiled
from experiments.bench.exact import ours, qkv

_TOKENS = 32768  # of a batch, for every length
_LONGEST_PLANE = 8192  # XLA's form keeps all weights


def beside_cudnn(length: int, *, causal: bool) -> Case:
    """The scaled dot product in bfloat16, 16 heads of depth 64, 32768 tokens."""
    arguments = qkv(_TOKENS // length, length, 16, dtype=jnp.bfloat16)
    mask = aj.masks.causal() if causal else None
    contestants = {
        name: compiled(ours(mask=mask, implementation=name), arguments)
        for name in ("flash", "cudnn")
    }
    contestants["picked"] = compiled(ours(mask=mask), arguments)
    ratios = [Ratio("flash", "cudnn"), Ratio("picked", "cudnn")]
    if length <= _LONGEST_PLANE:

        def xla(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(query, key, value, is_causal=causal)

        contestants["jax.nn"] = compiled(xla, arguments)
        ratios.append(Ratio("picked", "jax.nn"))
    kind = "causal" if causal else "full"
    title = f"bfloat16, {kind}, T = S = {length}, N 16, H 64, B {_TOKENS // length}"
    return Case(f"gpu-{kind}-{length}", title, contestants, ratios, sized="quick")


def cases() -> list[Case]:
    """The cases that need a GPU; none elsewhere."""
    if jax.default_backend() != "gpu":
        return []
    lengths = (1024, 4096, 16384, 32768)
    return [beside_cudnn(n, causal=causal) for n in lengths for causal in (False, True)]
