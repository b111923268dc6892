"""What every attention of a model is given: for losses between the maps of two models.

output, inputs = attention_inputs(model, x)      inside the loss, differentiable
"""

from typing import Any, NamedTuple

from attention_jax.diagnostics import flavours
from attention_jax.kernels.request import Request, Result


class AttentionInputs(NamedTuple):
    """What one call of attention was given, in the words of `attend`; a pytree.

    Attributes:
        query: `[*B, T, N, H]`, projected, normalised and turned.
        key: `[*B, S, K, H]`, likewise.
        value: `[*B, S, K, V]`.
        score: the score object, with the layer's parameters.
        mask: a mask object, or None.
        bias: a bias object, or None.
        query_positions: ints, or None for 0..T-1.
        key_positions: ints, or None for 0..S-1.
    """

    query: Any
    key: Any
    value: Any
    score: Any
    mask: Any
    bias: Any
    query_positions: Any
    key_positions: Any


def attention_inputs(
    model: Any, *inputs: Any, variables: Any = None, method: str | None = None, **options: Any
) -> tuple[Any, dict[str, AttentionInputs]]:
    """A model's output, and what every attention in it was given.

    Queries and keys of a teacher and of a student are what `attention_divergence` compares, values
    what `value_relation` does. To be called inside a loss: all is differentiable, and nothing is
    computed that the model would not. Nothing is compiled here either, and what the model's modules
    write in the call is dropped.

    Args:
        model: as in `capture`, and so are the others.
        *inputs: as in `capture`.
        variables: as in `capture`.
        method: as in `capture`.
        **options: as in `capture`.

    Returns:
        The output, and `AttentionInputs` by the attention's path, in the order of running. Those of
        scanned layers come stacked, under one path.

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

    def look(request: Request, run: Any, implementation: Any, kind: str) -> tuple[Result, Any]:
        given = AttentionInputs(*(getattr(request, name) for name in AttentionInputs._fields))
        return run(request), given

    parts = flavours.take_apart(model, variables)
    output, found = flavours.run(parts, flavours.Watch(look), method, inputs, options)
    return output, {name: x.kept for name, x in found.items()}
