"""Layers on top of one another: encoder and decoder, from features to features."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import AnyMask, Features, Memory
from attention_jax._modules.flags import Flag
from attention_jax.nnx.layers import TransformerDecoderLayer, TransformerEncoderLayer
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.randomness import AnyRngs
from attention_jax.softmax import Stats


def _last_norm(norm: str, features: int, options: dict[str, Any], rngs: nnx.Rngs) -> Any:
    """Pre-norm layers leave their sum as it is, so the stack ends in a norm; post-norm has it."""
    if norm != "pre":
        return nnx.data(None)
    dtypes = {name: options[name] for name in ("dtype", "param_dtype") if name in options}
    return LayerNorm(features, rngs=rngs, **dtypes)


class TransformerEncoder(nnx.Module):
    """Encoder layers on top of one another: every state comes to know the whole source.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: As in `TransformerEncoderLayer`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerEncoder
        >>> encoder = TransformerEncoder(2, 2, 8, 16, norm="pre", rngs=nnx.Rngs(0))
        >>> encoder(jnp.ones((3, 5, 8))).shape
        (3, 5, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.num_layers = check_count("num_layers", num_layers, 1)
        self.layers = nnx.List(
            TransformerEncoderLayer(
                num_heads, in_features, mlp_features, norm=norm, rngs=rngs, **options
            )
            for _ in range(num_layers)
        )
        self.norm: LayerNorm | None = _last_norm(norm, in_features, options, rngs)

    def __call__(
        self,
        x: Memory,
        mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> Float[Array, "*B S D"]:
        """The states after the last layer.

        Args:
            x: `[*B, S, in_features]`.
            mask: A mask object or boolean array `[*#B, #N, #S, #S]`, True where a query may see.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.

        Returns:
            `[*B, S, in_features]`.
        """
        for layer in self.layers:
            x = layer(x, mask, deterministic=deterministic, rngs=rngs)
        return jnp.asarray(x) if self.norm is None else self.norm(x)


class TransformerDecoder(nnx.Module):
    """Decoder layers on top of one another: causal on itself, and seeing a memory in every layer.

    Args:
        num_layers: How many.
        num_heads: N, the number of heads.
        in_features: D, width of input, memory and output.
        mlp_features: Width of the networks' hidden layers.
        norm: "post" as in the original, or "pre", which ends the stack with one more LayerNorm.
        rngs: Streams for the parameters and, with a rate, "dropout".
        **options: As in `TransformerDecoderLayer`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import TransformerDecoder
        >>> decoder = TransformerDecoder(2, 2, 8, 16, rngs=nnx.Rngs(0))
        >>> decoder(jnp.ones((3, 4, 8)), jnp.ones((3, 5, 8))).shape
        (3, 4, 8)

    References:
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        in_features: int,
        mlp_features: int,
        *,
        norm: str = "post",
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self.num_layers = check_count("num_layers", num_layers, 1)
        self.layers = nnx.List(
            TransformerDecoderLayer(
                num_heads, in_features, mlp_features, norm=norm, rngs=rngs, **options
            )
            for _ in range(num_layers)
        )
        self.norm: LayerNorm | None = _last_norm(norm, in_features, options, rngs)

    def __call__(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> Float[Array, "*B T D"]:
        """The states after the last layer.

        Args:
            x: `[*B, T, in_features]`.
            memory: `[*B, S, in_features]`.
            mask: For self-attention, with the causal mask.
            memory_mask: For attention to the memory.
            deterministic: Whether to leave dropout out; wins over the constructor's flag.
            rngs: Where dropout keys come from; wins over the layers' own streams.

        Returns:
            `[*B, T, in_features]`.
        """
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask, deterministic=deterministic, rngs=rngs)
        return self._finish(x)

    def with_weights(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "L *B N T S"]]:
        """The states, and every layer's weights of its attention to the memory, before dropout.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            The states and `[num_layers, *B, N, T, S]`.
        """
        every = []
        for layer in self.layers:
            x, weights = layer.with_weights(
                x, memory, mask, memory_mask, deterministic=deterministic, rngs=rngs
            )
            every.append(weights)
        return self._finish(x), jnp.stack(every)

    def with_stats(
        self,
        x: Features,
        memory: Memory,
        mask: AnyMask = None,
        memory_mask: AnyMask = None,
        *,
        deterministic: Flag = None,
        rngs: AnyRngs = None,
    ) -> tuple[Float[Array, "*B T D"], Stats]:
        """The states, and the statistics of every layer's attention to the memory.

        Nothing of size T·S is kept.

        Args:
            x: As in the call; so are the others.
            memory: As in the call.
            mask: As in the call.
            memory_mask: As in the call.
            deterministic: As in the call.
            rngs: As in the call.

        Returns:
            The states and statistics `[num_layers, *B, N, T]`.
        """
        every = []
        for layer in self.layers:
            x, stats = layer.with_stats(
                x, memory, mask, memory_mask, deterministic=deterministic, rngs=rngs
            )
            every.append(stats)
        return self._finish(x), jax.tree.map(lambda *parts: jnp.stack(parts), *every)

    def _finish(self, x: Any) -> Array:
        return jnp.asarray(x) if self.norm is None else self.norm(x)
