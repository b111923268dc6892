"""Our attention inside `flax.nnx.MultiHeadAttention`: `attention_fn=` is what to swap."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Float

from attention_jax._core.axes import Array, Key, Query, Value
from attention_jax._modules import interop
from attention_jax._modules.arguments import AnyBias, AnyMask
from attention_jax._modules.recipes import ScoreRecipe
from attention_jax.scores import Score


class AttentionFn(interop.AttentionFn):
    """The callable, with every name that Flax may pass."""

    def __call__(
        self,
        query: Query,
        key: Key,
        value: Value,
        bias: AnyBias = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float | int = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = dtypes.promote_dtype,
        is_causal: bool = False,
    ) -> Float[Array, "*B T N V"]:
        """The attention, as `flax.nnx.dot_product_attention` is called.

        Args:
            query: `[*B, T, N, H]`.
            key: `[*B, S, K, H]`.
            value: `[*B, S, K, V]`.
            bias: Added to the scores: an array `[*#B, #N, #T, #S]` or a bias object.
            mask: A mask object or an array `[*#B, #N, #T, #S]`, boolean or of 0 and 1.
            broadcast_dropout: One dropout mask `[T, S]` for all batch entries and heads.
            dropout_rng: A PRNG key, needed with a rate unless `deterministic`.
            dropout_rate: Probability that a weight is dropped, in [0, 1).
            deterministic: Whether to leave dropout out.
            dtype: Dtype of inputs and output; None is the inputs' common one.
            precision: As in `jax.lax.Precision`.
            module: A `flax.nnx.Module` into which the weights, before dropout, are sown as
                "attention_weights"; that takes O(T·S) memory.
            promote_dtype: What brings query, key and value to one dtype, as in Flax.
            is_causal: Whether query t sees keys 0..t only, besides what the mask says.

        Returns:
            `[*B, T, N, V]`.
        """
        sow = None if module is None else _sower(module)
        if promote_dtype is not dtypes.promote_dtype:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        call = interop.Call(
            bias=bias,
            mask=mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype if promote_dtype is dtypes.promote_dtype else query.dtype,
            precision=precision,
            is_causal=is_causal,
        )
        return self._run(query, key, value, call, sow)


def _sower(module: Any) -> Callable[[Array], Any]:
    """What hands the weights to the module, where Flax's own attention does."""
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module must be a flax.nnx.Module, got {type(module).__name__}")
    return functools.partial(module.sow, nnx.Intermediate, "attention_weights")


@interop.factory
def attention_fn(
    score: Score | ScoreRecipe | str | None = None,
    mask: AnyMask = None,
    bias: AnyBias = None,
    implementation: Any = None,
    block_size: int | tuple[int, int] | None = None,
) -> AttentionFn:
    """Our attention for `flax.nnx.MultiHeadAttention(attention_fn=...)`.

        out_t = Σ_s softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) ) · v_s

    Flax's module keeps its projections, parameters, cache and dropout rules; every mask, bias, flag
    and key that it passes is honoured. Masks made by Flax's helpers, which hold 0.0 and 1.0, become
    boolean; other numbers are an error, and under tracing, where they cannot be seen, NaN in the
    output. A query that may see nothing gets 0.

    In a step of Flax's cached decode (one query, and the mask that hides the unwritten keys) the
    query stands at the last key that this mask shows: `is_causal`, masks and biases go by that, and
    `causal(align="end")` is `causal()`, and `log_length` counts the keys up to there: the step
    gives the last row of a full pass over the tokens so far.

    Args:
        score: A score object, or a name or recipe without parameters ("dot", "scaled_dot"); None is
            the scaled dot product. Arrays in it are constants here: no optimizer sees them. For a
            score that trains use `attention_jax.nnx.MultiHeadAttention`.
        mask: A mask object or boolean array that holds in every call, besides the call's own.
        bias: A bias object or array added in every call, besides the call's own.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Returns:
        A callable; two with equal options are equal, so what is compiled for one serves the other.

    Raises:
        TypeError: If an option is of the wrong kind, such as a mask that is not boolean, or Flax
            was handed `attention_fn` itself and not what it makes.
        ValueError: If the score has parameters still to be made, or there is no such kernel.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> import attention_jax as aj
        >>> from attention_jax.nnx import attention_fn
        >>> cosine = attention_fn(score=aj.scores.cosine(10.0), mask=aj.masks.causal())
        >>> layer = nnx.MultiHeadAttention(
        ...     4, 16, decode=False, attention_fn=cosine, rngs=nnx.Rngs(0)
        ... )
        >>> layer(jnp.ones((2, 7, 16))).shape
        (2, 7, 16)
    """
    return AttentionFn(**interop.options(score, mask, bias, implementation, block_size))
