"""Stacks of layers, unrolled or scanned, with optional rematerialisation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from attention_jax.layers.remat import checkpoint_policy

Call = Callable[..., tuple[Any, Any]]


def apply_layers(stack: Any, call: Call, carry: Any, items: Any) -> tuple[Any, Any]:
    """`Body._each` for Linen, whose random keys are passed to `apply`."""
    if stack.remat is not False:
        call = nn.remat(call, policy=checkpoint_policy(stack.remat))
    if stack.scan_layers:
        every_one: Any = {"variable_axes": {True: 0}, "split_rngs": {True: True}}
        scan = nn.scan(call, length=stack.num_layers, **every_one)
        return scan(stack.layers, carry, items)
    every = []
    for i, layer in enumerate(stack.layers):
        carry, extra = call(layer, carry, None if items is None else items[i])
        every.append(extra)
    return carry, tuple(every)
