"""Our attention inside Flax Linen's own modules: `attention_fn=` is what to swap."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Float

from attention_jax._core.axes import Array, Key, Query, Value
from attention_jax._modules import interop
from attention_jax._modules.arguments import AnyBias, AnyMask
from attention_jax._modules.recipes import ScoreRecipe
from attention_jax.scores import Score


class AttentionFn(interop.AttentionFn):
    """The callable. Flax drops an argument silently where it has no parameter of that name."""

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
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*B T N V"]:
        """The attention, as `flax.linen.dot_product_attention` is called.

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
            module: A `flax.linen.Module` into which the weights, before dropout, are sown as
                "attention_weights"; that takes O(T·S) memory.
            force_fp32_for_softmax: The softmax is in float32 at least in any case.
            einsum_dot_general: Refused: there is no einsum whose product it could replace.
            qk_attn_weights_einsum: Refused, as above.
            attn_weights_value_einsum: Refused, as above.
            is_causal: Whether query t sees keys 0..t only, besides what the mask says.

        Returns:
            `[*B, T, N, V]`.

        Raises:
            NotImplementedError: If an einsum is to be replaced.
        """
        del force_fp32_for_softmax  # always so
        for name, einsum in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(
                    f"{name}: scores and outputs are computed in blocks, by no einsum that could "
                    "be replaced; leave it out, or use Flax's own attention"
                )
        sow = None if module is None else _sower(module)
        call = interop.Call(
            bias=bias,
            mask=mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            is_causal=is_causal,
        )
        return self._run(query, key, value, call, sow)


def _sower(module: Any) -> Callable[[Array], Any]:
    """What hands the weights to the module, where Flax's own attention does."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a flax.linen.Module, got {type(module).__name__}")
    return functools.partial(module.sow, "intermediates", "attention_weights")


@interop.factory
def attention_fn(
    score: Score | ScoreRecipe | str | None = None,
    mask: AnyMask = None,
    bias: AnyBias = None,
    implementation: Any = None,
    block_size: int | tuple[int, int] | None = None,
) -> AttentionFn:
    """Our attention for `flax.linen.MultiHeadDotProductAttention(attention_fn=...)`.

        out_t = Σ_s softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) ) · v_s

    Flax's module keeps its projections, parameters, cache and dropout rules; every mask, bias, flag
    and key that it passes is honoured, and what cannot be is refused. Masks made by Flax's helpers,
    which hold 0.0 and 1.0, become boolean; other numbers are an error, and under tracing, where
    they cannot be seen, NaN in the output. A query that may see nothing gets 0.

    In a step of Flax's cached decode (one query, and the mask that hides the unwritten keys) the
    query stands at the last key that this mask shows: masks and biases go by that, and
    `causal(align="end")` is `causal()`, and `log_length` counts the keys up to there: the step
    gives the last row of a full pass over the tokens so far.

    Args:
        score: A score object, or a name or recipe without parameters ("dot", "scaled_dot"); None is
            the scaled dot product. Arrays in it are constants here: no optimizer sees them. For a
            score that trains use `attention_jax.linen.MultiHeadAttention`.
        mask: A mask object or boolean array that holds in every call, besides the call's own.
        bias: A bias object or array added in every call, besides the call's own.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.

    Returns:
        A callable; two with equal options are equal.

    Raises:
        TypeError: If an option is of the wrong kind, such as a mask that is not boolean, or Flax
            was handed `attention_fn` itself and not what it makes.
        ValueError: If the score has parameters still to be made, or there is no such kernel.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import flax.linen as nn
        >>> import attention_jax as aj
        >>> from attention_jax.linen import attention_fn
        >>> local = attention_fn(mask=aj.masks.window(2, 0))
        >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=local)
        >>> x = jnp.ones((2, 7, 16))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 7, 16)
    """
    return AttentionFn(**interop.options(score, mask, bias, implementation, block_size))
