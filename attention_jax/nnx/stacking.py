"""Layers on top of one another: written out or scanned, kept or recomputed in the backward pass.

A scanned stack is one layer whose every variable has an axis of layers in front. Its parameters,
its dropout streams and its numbers are those of the layers written out; what is compiled is one
layer, however many there are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_count
from attention_jax._modules.arguments import cast, check_width
from attention_jax._modules.policy import Remat as Remat
from attention_jax._modules.policy import checkpoint_policy
from attention_jax._modules.settings import check_settings
from attention_jax.nnx.randomness import AnyRngs

Call = Callable[[Any, Any, Any, AnyRngs], tuple[Any, Any]]


class LayerStack(nnx.Module):
    """Base of the stacks: builds the layers, and runs something through them in turn."""

    in_features: int
    dtype: Any

    def _build(
        self, make: Callable[[], Any], num_layers: int, *, scan_layers: bool, remat: Remat
    ) -> None:
        self.num_layers = check_count("num_layers", num_layers, 1)
        check_settings(scan_layers=scan_layers)
        self.scan_layers = scan_layers
        checkpoint_policy(remat)
        self.remat = remat
        layers = [make() for _ in range(num_layers)]
        self.layers: Any = _stacked(layers) if scan_layers else nnx.List(layers)

    def _enter(self, x: Any) -> Array:
        """The first layer's input in the dtype of the last one's output, as a scan needs it."""
        check_width("x", x, self.in_features, "[*B, length, in_features]")
        return jnp.asarray(cast(x, self.dtype))

    def _each(
        self, call: Call, carry: Any, items: Any = None, rngs: AnyRngs = None
    ) -> tuple[Any, Any]:
        """`carry, extra = call(layer, carry, item, rngs)`, layer by layer.

        Args:
            call: What to do with a layer.
            carry: What goes through all of them.
            items: One for each layer: a sequence, or stacked where the layers are scanned.
            rngs: Where dropout keys come from in place of the layers' own streams.

        Returns:
            The carry after the last layer, and the extras: a tuple, or stacked where scanned.
        """
        if self.scan_layers:
            return self._scan(call, carry, items, rngs)
        extras = []
        for i, layer in enumerate(self.layers):
            item = None if items is None else items[i]
            run = _in_place if self.remat is False else self._recomputed
            carry, extra = run(call, layer, carry, item, rngs)
            extras.append(extra)
        return carry, tuple(extras)

    def _stack(self, extras: Any) -> Any:
        """Extras with an axis of layers in front, whichever way they came."""
        if self.scan_layers:
            return extras
        return jax.tree.map(lambda *parts: jnp.stack(parts), *extras)

    def _recomputed(
        self, call: Call, layer: Any, carry: Any, item: Any, rngs: AnyRngs
    ) -> tuple[Any, Any]:
        pure = _Pure(call, layer, rngs)
        run = jax.checkpoint(pure, policy=checkpoint_policy(self.remat))
        carry, extra, rest, stream = run(pure.params, pure.rest, pure.stream, carry, item)
        pure.settle(layer, rest, rngs, stream)
        return carry, extra

    def _scan(self, call: Call, carry: Any, items: Any, rngs: AnyRngs) -> tuple[Any, Any]:
        pure = _Pure(call, self.layers, rngs)
        run: Any = pure
        if self.remat is not False:
            run = jax.checkpoint(pure, policy=checkpoint_policy(self.remat))

        def step(before: Any, layer: Any) -> tuple[Any, Any]:
            params, rest, item = layer
            carry, extra, rest, stream = run(params, rest, before[1], before[0], item)
            return (carry, stream), (extra, rest)

        (carry, stream), (extras, rest) = jax.lax.scan(
            step, (carry, pure.stream), (pure.params, pure.rest, items)
        )
        pure.settle(self.layers, rest, rngs, stream)
        return carry, extras


def _in_place(call: Call, layer: Any, carry: Any, item: Any, rngs: AnyRngs) -> tuple[Any, Any]:
    return call(layer, carry, item, rngs)


class _Pure:
    """A call of a layer as a function of arrays: variables in, and those that change out again.

    Attributes:
        params: The layer's parameters.
        rest: Its other variables, dropout streams among them.
        stream: The variables of the streams given in the call.
    """

    def __init__(self, call: Call, layer: Any, rngs: AnyRngs) -> None:
        self._call = call
        self._graph, self.params, self.rest = nnx.split(layer, nnx.Param, ...)
        self._rngs, self.stream = (None, None) if rngs is None else nnx.split(rngs)
        self._changed = False

    def __call__(self, params: Any, rest: Any, stream: Any, carry: Any, item: Any) -> Any:
        old = jax.tree.leaves(rest)  # before it is merged: the layer writes into it
        layer = nnx.merge(self._graph, params, rest)
        rngs = None if self._rngs is None else nnx.merge(self._rngs, stream)
        carry, extra = self._call(layer, carry, item, rngs)
        after = nnx.split(layer, nnx.Param, ...)[2]
        stream = None if rngs is None else nnx.split(rngs)[1]
        # A variable that nobody wrote to is the very array it was.
        new = jax.tree.leaves(after)
        # What was not there before is an intermediate that somebody keeps.
        self._changed |= len(new) != len(old)
        self._changed |= any(a is not b for a, b in zip(old, new, strict=False))
        return carry, extra, after, stream

    def settle(self, layer: Any, rest: Any, rngs: AnyRngs, stream: Any) -> None:
        """Writes back what changed: nothing where no stream was drawn from."""
        if self._changed:
            nnx.update(layer, rest)
        if rngs is not None:
            nnx.update(rngs, stream)


def _stacked(layers: Sequence[Any]) -> Any:
    """One layer whose variables are those of all of them, stacked."""
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    if any(graph != graphs[0] for graph in graphs):
        raise ValueError("scan_layers needs layers of one structure, but the score makes several")
    return nnx.merge(graphs[0], jax.tree.map(lambda *parts: jnp.stack(parts), *states))
