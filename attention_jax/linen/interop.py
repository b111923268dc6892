"""This library's attention as the `attention_fn` of Flax Linen's modules."""

import functools
from typing import Any

import flax.linen as nn
from jaxtyping import Float

from attention_jax._core.axes import Array, Key, Query, Value
from attention_jax.layers import interop
from attention_jax.layers.arguments import AnyBias


class AttentionFn(interop.AttentionFn):
    """The callable. Flax silently drops arguments for which it has no parameter."""

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
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> Float[Array, "*B T N V"]:
        """Attention with the signature of `flax.linen.dot_product_attention`.

        Args:
            module: A `flax.linen.Module` into which the weights, before dropout, are sown as
                "attention_weights", in O(T·S) memory.
            einsum_dot_general: Not supported: there is no einsum whose product it could replace.
            qk_attn_weights_einsum: Not supported.
            attn_weights_value_einsum: Not supported.

        Returns:
            `[*B, T, N, V]`.

        Raises:
            NotImplementedError: If an einsum argument is given.
        """
        for name, einsum in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(
                    f"{name} is not supported: scores and outputs are computed in blocks, without "
                    "an einsum; omit it, or use Flax's attention"
                )
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module must be a flax.linen.Module, got {type(module).__name__}")
        sow = module and functools.partial(module.sow, "intermediates", "attention_weights")
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
    """This library's attention for `flax.linen.MultiHeadDotProductAttention(attention_fn=...)`.

    Unsupported arguments raise errors.

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
    """,
)
