"""How a body becomes a Linen module: its fields, its parts and its random keys."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn

from attention_jax._core.axes import Array
from attention_jax.layers import body
from attention_jax.layers.construction import Construction, Draw
from attention_jax.linen.projection import Projection
from attention_jax.linen.randomness import dropout_key
from attention_jax.linen.scores import ScoreParameters


class Layer(body.Body, nn.Module):
    """Base of the Linen modules that are made of a body."""

    _flavour: ClassVar[str] = "linen"

    def __init_subclass__(cls, **options: Any) -> None:
        body.adopt_methods(cls)
        own = vars(cls).get("__doc__")
        super().__init_subclass__(**options)
        if any(body.is_body(base) for base in cls.__bases__):
            cls.__doc__ = own
            body.describe_class(cls, inspect.signature(cls))

    def __post_init__(self) -> None:
        self._check(self)
        super().__post_init__()

    def setup(self) -> None:
        """Makes the parts."""
        self._build(LinenConstruction(self))

    def _part(self, name: str) -> Any:
        return getattr(self, f"_part_{name}")

    def _dropout_key(self, name: str, training: bool | Array, dropout_rng: Any = None) -> Any:
        return dropout_key(self, name, training, dropout_rng)


class AttentionLayer(Layer):
    """Base of the Linen modules that call `attend`."""

    _random: ClassVar[Mapping[str, str]] = {
        "dropout_rng": 'The dropout key; None takes one from the stream "dropout".'
    }


class LinenConstruction(Construction):
    """Makes the parts of a Linen module, in its `setup`."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._layer = layer

    def dense(self, inputs: int, outputs: int, **options: Any) -> nn.Dense:
        """`flax.linen.Dense`."""
        del inputs
        return nn.Dense(outputs, **self.linear_options(**options))

    def projection(self, inputs: Any, features: Any, axes: int = 1, **options: Any) -> Projection:
        """`Projection`, whose sizes are those of a call."""
        del inputs, features
        return Projection(axes=axes, **self.linear_options(**options))

    def param(self, name: str, draw: Draw) -> Array:
        """`Module.param`."""
        return self._layer.param(name, draw)

    def dropout_stream(self, rate: float | int) -> None:
        """Nothing: the stream comes with `apply`."""

    def score(self, given: Any, num_heads: int, query_depth: int, key_depth: int) -> None:
        """`ScoreParameters`, whose sizes are those of queries and keys in a call."""
        settings = self.take("dtype", "param_dtype", "kernel_init")
        self.keep("score", ScoreParameters(score=given, **settings))

    def keep(self, name: str, part: Any) -> None:
        """A submodule of that name, as the attribute `_part_name`: a field keeps its own."""
        setattr(self._layer, f"_part_{name}", part.clone(parent=self._layer, name=name))
