"""This library's attention as the `attention_fn` of `flax.nnx.MultiHeadAttention`."""

import functools
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Float

from attention_jax._core.axes import Array, Key, Query, Value
from attention_jax.layers import interop
from attention_jax.layers.arguments import AnyBias


class AttentionFn(interop.AttentionFn):
    """The callable, with every argument that Flax passes."""

    @interop.described
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
        force_fp32_for_softmax: bool = False,
    ) -> Float[Array, "*B T N V"]:
        """Attention with the signature of `flax.nnx.dot_product_attention`.

        Args:
            module: A `flax.nnx.Module` into which the weights, before dropout, are sown as
                "attention_weights", in O(T·S) memory.
            promote_dtype: Converts query, key and value to one dtype, as in Flax.

        Returns:
            `[*B, T, N, V]`.
        """
        if module is not None and not isinstance(module, nnx.Module):
            raise TypeError(f"module must be a flax.nnx.Module, got {type(module).__name__}")
        sow = module and functools.partial(module.sow, nnx.Intermediate, "attention_weights")
        if promote_dtype is not dtypes.promote_dtype:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
            dtype = query.dtype
        return self._run(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            is_causal=is_causal,
            force_fp32_for_softmax=force_fp32_for_softmax,
            sow=sow,
        )


attention_fn = interop.factory(
    AttentionFn,
    """This library's attention for `flax.nnx.MultiHeadAttention(attention_fn=...)`.

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
    """,
)
