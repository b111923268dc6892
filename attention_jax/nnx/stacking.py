"""Stacks of layers, unrolled or scanned, with optional rematerialisation.

A scanned stack is one layer whose variables have a leading axis of layers. Its parameters, dropout
streams and results are those of the unrolled layers; only one layer is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.layers.remat import checkpoint_policy

Call = Callable[..., tuple[Any, Any]]


def apply_layers(
    stack: Any, call: Call, carry: Any, items: Any, random: Mapping[str, Any]
) -> tuple[Any, Any]:
    """`Body._each` for NNX; `random` holds `rngs`, or is empty."""
    rngs = random.get("rngs")
    if stack.scan_layers:
        return _scan(stack, call, carry, items, rngs)
    extras = []
    for i, layer in enumerate(stack.layers):
        item = None if items is None else items[i]
        if stack.remat is False:
            carry, extra = call(layer, carry, item, **random)
        else:
            carry, extra = _recomputed(stack, call, layer, carry, item, rngs)
        extras.append(extra)
    return carry, tuple(extras)


def stacked(layers: Sequence[Any]) -> Any:
    """One layer with the stacked variables of all layers."""
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    if any(graph != graphs[0] for graph in graphs):
        raise ValueError("scan_layers needs layers of one structure, but the score makes several")
    return nnx.merge(graphs[0], jax.tree.map(lambda *parts: jnp.stack(parts), *states))


def _recomputed(
    stack: Any, call: Call, layer: Any, carry: Any, item: Any, rngs: Any
) -> tuple[Any, Any]:
    pure = _Pure(call, layer, rngs)
    run = jax.checkpoint(pure, policy=checkpoint_policy(stack.remat))
    carry, extra, rest, stream = run(pure.params, pure.rest, pure.stream, carry, item)
    pure.settle(layer, rest, rngs, stream)
    return carry, extra


def _scan(stack: Any, call: Call, carry: Any, items: Any, rngs: Any) -> tuple[Any, Any]:
    pure = _Pure(call, stack.layers, rngs)
    run: Any = pure
    if stack.remat is not False:
        run = jax.checkpoint(pure, policy=checkpoint_policy(stack.remat))

    def step(before: Any, layer: Any) -> tuple[Any, Any]:
        params, rest, item = layer
        carry, extra, rest, stream = run(params, rest, before[1], before[0], item)
        return (carry, stream), (extra, rest)

    (carry, stream), (extras, rest) = jax.lax.scan(
        step, (carry, pure.stream), (pure.params, pure.rest, items)
    )
    pure.settle(stack.layers, rest, rngs, stream)
    return carry, extras


class _Pure:
    """A call of a layer as a pure function of its variables, which returns the changed ones.

    Attributes:
        params: The layer's parameters.
        rest: Its other variables, dropout streams among them.
        stream: The variables of the streams given in the call.
    """

    def __init__(self, call: Call, layer: Any, rngs: Any) -> None:
        self._call = call
        self._graph, self.params, self.rest = nnx.split(layer, nnx.Param, ...)
        self._rngs, self.stream = (None, None) if rngs is None else nnx.split(rngs)
        self._changed = False

    def __call__(self, params: Any, rest: Any, stream: Any, carry: Any, item: Any) -> Any:
        old = jax.tree.leaves(rest)  # before the merge: the layer mutates it
        layer = nnx.merge(self._graph, params, rest)
        rngs = None if self._rngs is None else nnx.merge(self._rngs, stream)
        random = {} if rngs is None else {"rngs": rngs}
        carry, extra = self._call(layer, carry, item, **random)
        after = nnx.split(layer, nnx.Param, ...)[2]
        stream = None if rngs is None else nnx.split(rngs)[1]
        # A variable without updates is the same array.
        new = jax.tree.leaves(after)
        # A new variable is an intermediate.
        self._changed |= len(new) != len(old)
        self._changed |= any(a is not b for a, b in zip(old, new, strict=False))
        return carry, extra, after, stream

    def settle(self, layer: Any, rest: Any, rngs: Any, stream: Any) -> None:
        """Writes back the changed variables of the streams."""
        if self._changed:
            nnx.update(layer, rest)
        if rngs is not None:
            nnx.update(rngs, stream)
