"""Differentiable statistics and inputs of every attention of a model, for use inside a loss.

output, stats = attention_stats(model, inputs)
output, given = attention_inputs(model, inputs)
"""

import dataclasses
from typing import Any

from attention_jax._core.docstrings import arguments_of
from attention_jax.diagnostics.application import Call, prepare
from attention_jax.diagnostics.capture import capture
from attention_jax.kernels.request import AttentionInputs, Result
from attention_jax.softmax import Stats


@arguments_of(capture)
def attention_stats(
    model: Any, *inputs: Any, variables: Any = None, method: str | None = None, **options: Any
) -> tuple[Any, dict[str, Stats]]:
    """The output of a model, and lse, entropy and largest logit of every attention in it.

    For use inside a loss: the statistics are differentiable, and the kernels that run anyway
    compute them. The function does not compile; the caller's `jit` does. State that the modules
    write is discarded.

    Returns:
        The output, and `Stats` with rows `[*B, N, T]` by the attention's path, in order of
        execution.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoder
        >>> model = TransformerEncoder(1, 2, 8, 16, rngs=nnx.Rngs(0))
        >>> out, stats = aj.diagnostics.attention_stats(model, jnp.ones((3, 5, 8)))
        >>> {path: row.entropy.shape for path, row in stats.items()}
        {'layers/0/self_attention': (3, 2, 5)}
    """

    def record(call: Call) -> tuple[Result, Stats | None]:
        result = call.run(dataclasses.replace(call.request, statistics=True))
        return result, result.stats

    output, found = prepare(model, variables, method, inputs, options).run(record)
    return output, {name: x.values for name, x in found.items()}


@arguments_of(capture)
def attention_inputs(
    model: Any, *inputs: Any, variables: Any = None, method: str | None = None, **options: Any
) -> tuple[Any, dict[str, AttentionInputs]]:
    """The output of a model, and the inputs of every attention in it.

    For losses between a teacher and a student: queries and keys are the arguments of
    `attention_divergence`, values those of `value_relation`. Everything is differentiable, and
    nothing is computed beyond the model. The function does not compile, and state that the modules
    write is discarded.

    Returns:
        The output, and `AttentionInputs` by the attention's path, in order of execution. Those of
        scanned layers are stacked under one path.

    Example:
        >>> import jax
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import TransformerEncoder
        >>> x = jax.random.normal(jax.random.key(0), (3, 5, 8))
        >>> teacher, student = (TransformerEncoder(1, n, 8, 8, rngs=nnx.Rngs(n)) for n in (4, 2))
        >>> path, attention_inputs = "layers/0/self_attention", aj.diagnostics.attention_inputs
        >>> its, own = (attention_inputs(m, x)[1][path] for m in (teacher, student))
        >>> pairs = (its.query, its.key), (own.query, own.key)
        >>> aj.distillation.attention_divergence(*pairs).shape
        (3, 2, 5)
    """

    def record(call: Call) -> tuple[Result, AttentionInputs]:
        given = (getattr(call.request, name) for name in AttentionInputs._fields)
        return call.run(call.request), AttentionInputs(*given)

    output, found = prepare(model, variables, method, inputs, options).run(record)
    return output, {name: x.values for name, x in found.items()}
