"""The base of Linen modules derived from bodies: fields, submodules and random keys."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax

from attention_jax._core.axes import Array, Shape
from attention_jax.layers import body
from attention_jax.layers.attention import MultiHeadAttention
from attention_jax.layers.construction import Construction, Draw
from attention_jax.layers.fused_projections import Projected
from attention_jax.linen.norm import LayerNorm
from attention_jax.linen.projection import Projection
from attention_jax.linen.randomness import dropout_key
from attention_jax.linen.scores import PositionParameters, ScoreParameters
from attention_jax.linen.stacking import apply_layers

Parts = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]

MODULES: dict[Any, Any] = {}  # modules by body


class Layer(body.Body, nn.Module):
    """Base of the Linen modules derived from a body.

    Args:
        parts: Overrides of submodules' settings, made by `prune_heads`: pairs of a path and of
            pairs of a name and a value.
    """

    parts: Parts = dataclasses.field(default=(), kw_only=True)

    _flavour: ClassVar[str] = "linen"

    def __init_subclass__(cls, **options: Any) -> None:
        body.adopt_methods(cls)
        own = vars(cls).get("__doc__")
        super().__init_subclass__(**options)
        if any(body.is_body(base) for base in cls.__bases__):
            MODULES[cls.__bases__[0]] = cls
            cls.__doc__ = own
            body.describe_class(cls, inspect.signature(cls))

    def __post_init__(self) -> None:
        self._check(self)
        if self._first is not None:
            getattr(self, self._first)(LinenConstruction(self, parent=None))
        super().__post_init__()

    def setup(self) -> None:
        """Creates the submodules."""
        self._build(LinenConstruction(self))
        self._change_parts(vars(self))

    @nn.nowrap
    def _change_parts(self, made: Mapping[str, Any]) -> None:
        """Sets the settings in `parts` of submodules, by name."""
        for path, changes in self.parts:
            step, _, rest = path.partition("/")
            name, _, index = step.rpartition("_")
            part = made.get(f"_part_{step}", made.get(step))
            if part is None and index.isdigit() and name in made:  # one of a list
                part = made[name][int(index)]
            if part is None:
                continue
            if rest:
                changes = (("parts", (*part.parts, (rest, changes))),)
            for setting, value in changes:
                object.__setattr__(part, setting, value)  # before its setup

    @nn.nowrap
    def _part(self, name: str) -> Any:
        return getattr(self, f"_part_{name}")

    @nn.nowrap
    def _unbound(self, name: str, build: Callable[[Construction], Any]) -> Any:
        # A bound submodule would need the variables.
        made = build(LinenConstruction(self, parent=None))
        self._change_parts({name: made})
        return made

    @nn.nowrap
    def _each(
        self, call: Callable[..., Any], carry: Any, items: Any = None, **random: Any
    ) -> tuple[Any, Any]:
        self._check_random(random)
        return apply_layers(self, call, carry, items)

    @nn.nowrap
    def _linear(self, part: Any, x: Any, features: Any, known: Projected | None = None) -> Array:
        return part(x, features) if known is None else part(x, features, known)

    @nn.nowrap
    def _kernels(self, parts: Any, inputs: Any, features: Any) -> Any:
        own = (1, self.use_bias, self.dtype, self.precision)
        as_made = all(
            type(part) is Projection
            and (part.axes, part.use_bias, part.dtype, part.precision) == own
            for part in parts
        )
        if self.is_initializing() or not as_made:
            return None
        return [part.parameters(inputs, own) for part, own in zip(parts, features, strict=True)]

    @nn.nowrap
    def _late(self, name: str, shape: Any) -> Array:
        return getattr(self, f"_late_{name}")(shape)

    @nn.nowrap
    def _dropout_key(self, name: str, training: bool | Array, dropout_rng: Any = None) -> Any:
        return dropout_key(self, name, training, dropout_rng)


class AttentionLayer(Layer):
    """Base of the Linen modules that call `attend`."""

    _random: ClassVar[Mapping[str, str]] = {
        "dropout_rng": 'The dropout key; None takes one from the stream "dropout".'
    }


class LateParameter(nn.Module):
    """A parameter whose shape is known in the call; it shares the scope of its layer."""

    called: str
    draw: Callable[[Array, Any], Array]

    @nn.compact
    def __call__(self, shape: Shape) -> Array:
        """The parameter."""
        return self.param(self.called, self.draw, shape)


class LinenConstruction(Construction):
    """Creates the submodules of a Linen module, in its `setup`."""

    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__(layer, body.setting_names(type(layer)))
        self._layer = layer
        self._options = options  # of submodules that are layers: parent=None leaves them unbound

    def dense(self, inputs: int, outputs: int, **options: Any) -> nn.Dense:
        """`flax.linen.Dense`."""
        del inputs
        return nn.Dense(outputs, **self.linear_options(**options))

    def projection(self, inputs: Any, features: Any, axes: int = 1, **options: Any) -> Projection:
        """A `Projection`, whose sizes are inferred in the call."""
        del inputs, features
        return Projection(axes=axes, **self.linear_options(**options))

    def embed(self, count: int, features: int, init: Any) -> nn.Embed:
        """`flax.linen.Embed`."""
        dtypes = self.take("dtype", "param_dtype")
        return nn.Embed(count, features, embedding_init=init, **dtypes)

    def param(self, name: str, draw: Draw) -> Array:
        """`Module.param`."""
        return self._layer.param(name, draw)

    def late_param(self, name: str, shape: Any, draw: Callable[[Array, Any], Array]) -> None:
        """`LateParameter`."""
        del shape
        late = LateParameter(name, draw)
        setattr(self._layer, f"_late_{name}", late)
        nn.share_scope(self._layer, late)

    def hash_key(self) -> Array:
        """A variable of the collection "hash"."""

        def draw() -> Array:
            return jax.random.key_data(self._layer.make_rng("params"))

        return self._layer.variable("hash", "hash_key", draw).value

    def discard(self, *names: str) -> None:
        """No operation: a submodule that is never called has no parameters."""

    def layer_norm(self, features: Any, *, name: str = "", **options: Any) -> LayerNorm:
        """`LayerNorm`."""
        del features, name
        return LayerNorm(**self.take("dtype", "param_dtype"), **options)

    def layer(self, body: Any, *args: Any, **options: Any) -> Any:
        """The Linen module of the body."""
        options = {**self.shared(body, options), **options}
        return MODULES[body](*args, **options, **self._options)

    def attention(self, kind: Any, *args: Any, **options: Any) -> Any:
        """The module made by `kind`."""
        make = MODULES[MultiHeadAttention] if kind is None else kind
        return make(*args, **options, **self._options)

    def layers(self, make: Callable[[], Any], count: int, scanned: bool) -> Any:
        """A list of layers, or one scanned layer."""
        return make() if scanned else [make() for _ in range(count)]

    def dropout_stream(self, rate: float | int) -> None:
        """No operation: `apply` provides the stream."""

    def score(self, given: Any, num_heads: int, query_depth: Any, key_depth: Any) -> None:
        """`ScoreParameters`, whose sizes are inferred from queries and keys."""
        self.keep("score", ScoreParameters(score=given, **self._drawing()))

    def positions(self, given: Any, num_heads: int, depth: int | None) -> None:
        """`PositionParameters`, whose sizes are inferred in the call."""
        self.keep("positions", PositionParameters(positions=given, **self._drawing()))

    def _drawing(self) -> dict[str, Any]:
        return self.take("dtype", "param_dtype", "kernel_init")

    def keep(self, name: str, part: Any) -> None:
        """A submodule of that name, as the attribute `_part_name`, since fields are reserved."""
        named = None if part is None else part.clone(parent=self._layer, name=name)
        setattr(self._layer, f"_part_{name}", named)
