"""Layers on top of one another: written out or scanned, kept or recomputed in the backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import cast, check_width
from attention_jax._modules.policy import Remat, checkpoint_policy
from attention_jax._modules.shield import shielded
from attention_jax.linen.parts import Parts

Call = Callable[[Any, Any, Any], tuple[Any, Any]]


def stacked(every: Sequence[Any]) -> Any:
    """One tree whose leaves are those of all of them, stacked."""
    return jax.tree.map(lambda *parts: jnp.stack(parts), *every)


class LayerStack(Parts):
    """What both stacks share: their layers, and a norm at the end of pre-norm ones."""

    num_layers: int
    num_heads: int
    in_features: int
    mlp_features: int
    _: dataclasses.KW_ONLY
    decode: bool = False
    scan_layers: bool = False
    remat: Remat = False

    def __post_init__(self) -> None:
        check_count("num_layers", self.num_layers, 1)
        checkpoint_policy(self.remat)
        self._check(self.num_heads, self.in_features, self.mlp_features, self.positions)
        super().__post_init__()

    def setup(self) -> None:
        """The layers, and the norm."""
        one = self._layer
        self.layers = one() if self.scan_layers else [one() for _ in range(self.num_layers)]
        # Pre-norm layers leave their sum as it is, so the stack ends in a norm; post-norm has it.
        self.last_norm = self._layer_norm(name="norm") if self.norm == "pre" else None

    @nn.nowrap
    def _layer(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no layers")

    @nn.nowrap
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_heads, self.in_features, self.mlp_features

    @nn.nowrap
    def _enter(self, x: Any) -> Array:
        """The first layer's input in the dtype of the last one's output, as a scan needs it."""
        check_width("x", x, self.in_features, "[*B, length, in_features]")
        return jnp.asarray(cast(x, self.dtype))

    def _each(self, call: Call, carry: Any, items: Any = None) -> tuple[Any, Any]:
        """`carry, extra = call(layer, carry, item)`, layer by layer.

        Args:
            call: What to do with a layer.
            carry: What goes through all of them.
            items: One for each layer: a sequence, or stacked where the layers are scanned.

        Returns:
            The carry after the last layer, and the extras: a tuple, or stacked where scanned.
        """
        if self.remat is not False:
            call = nn.remat(call, policy=checkpoint_policy(self.remat))
        if self.scan_layers:
            scan = nn.scan(
                call, variable_axes={True: 0}, split_rngs={True: True}, length=self.num_layers
            )
            return scan(self.layers, carry, items)
        every = []
        for i, layer in enumerate(self.layers):
            carry, extra = call(layer, carry, None if items is None else items[i])
            every.append(extra)
        return carry, tuple(every)

    @nn.nowrap
    def _stack(self, extras: Any) -> Any:
        """Extras with an axis of layers in front, whichever way they came."""
        return extras if self.scan_layers else stacked(extras)

    @nn.nowrap
    def _finish(self, x: Any) -> Array:
        return jnp.asarray(x) if self.last_norm is None else shielded(self.last_norm, x)
