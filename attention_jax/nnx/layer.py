"""The base of NNX modules derived from bodies: constructor, submodules and random keys."""

import dataclasses
import difflib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from attention_jax._core.axes import Array
from attention_jax._core.checks import check_flag
from attention_jax.layers import body
from attention_jax.layers.attention import MultiHeadAttention
from attention_jax.layers.construction import Construction, Draw
from attention_jax.layers.fused_projections import Projected
from attention_jax.layers.recipes import Sizes
from attention_jax.nnx.norm import LayerNorm
from attention_jax.nnx.randomness import check_rngs, dropout_key, fork_stream
from attention_jax.nnx.scores import Hash, PositionParameters, ScoreParameters
from attention_jax.nnx.stacking import apply_layers, stacked

Class = TypeVar("Class", bound=type)

MODULES: dict[Any, Any] = {}  # modules by body


@body.settings
class Layer(body.Body, nnx.Module):
    """Base of the NNX modules derived from a body.

    Args:
        rngs: Streams for the parameters and, with a dropout rate, "dropout".
    """

    _: dataclasses.KW_ONLY
    rngs: nnx.Rngs

    _flavour: ClassVar[str] = "nnx"
    _random: ClassVar[Mapping[str, str]] = {
        "rngs": "The stream of dropout keys, or the streams; overrides the layer's."
    }
    _flag_hint: ClassVar[str] = ", or call train() or eval()"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        body.adopt_methods(cls)

    def _part(self, name: str) -> Any:
        return getattr(self, name)

    def _unbound(self, name: str, build: Callable[[Construction], Any]) -> Any:
        del build  # made at construction
        return getattr(self, name)

    def _each(
        self, call: Callable[..., Any], carry: Any, items: Any = None, **random: Any
    ) -> tuple[Any, Any]:
        return apply_layers(self, call, carry, items, random)

    def _linear(self, part: Any, x: Any, features: Any, known: Projected | None = None) -> Array:
        del features  # known since construction
        return part(x) if known is None else known.y

    def _kernels(self, parts: Any, inputs: Any, features: Any) -> Any:
        del inputs, features
        if not all(_as_made(part, self, parts[0]) for part in parts):
            return None
        return [(p.kernel[...], None if p.bias is None else p.bias[...]) for p in parts]

    def _late(self, name: str, shape: Any) -> Array:
        del shape
        return getattr(self, name)[...]

    def _dropout_key(self, name: str, training: bool | Array, rngs: Any = None) -> Array:
        del training  # a missing stream is an error even if the flag is traced
        return dropout_key(name, rngs, self.rngs)


class DroppingLayer(Layer):
    """Base of the NNX modules with dropout."""

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the attributes of `flax.nnx.view`.

        Args:
            deterministic: Whether to disable dropout.
        """
        check_flag("deterministic", deterministic)
        if deterministic is not None:
            self.deterministic = deterministic


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
def module(cls: Class) -> Class:
    """Defines the constructor of an NNX module: the settings of its body and `rngs`.

    Settings become attributes, except those that are only passed to submodules.
    """
    body.settings(cls)
    shared = body.setting_names(cls.__bases__[0])  # the flavour's settings come last
    fields = sorted(
        dataclasses.fields(cls),  # type: ignore[arg-type]
        key=lambda field: (field.kw_only, field.name not in shared),
    )
    signature = inspect.Signature([_parameter(field) for field in fields])

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = _bind(type(self).__name__, signature, args, options)
        check_rngs(type(self).__name__, given.rngs)
        self._check(given)
        for name, value in vars(given).items():
            unused = name in self._passed_on or name.endswith(("rngs", "_init", "_metadata"))
            if name in self._with_arrays:
                setattr(self, name, nnx.data(self._with_arrays[name](value)))
            elif not unused:
                setattr(self, name, value)
        self._build(NnxConstruction(self, given))

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    bound = [self_parameter, *signature.parameters.values()]
    __init__.__signature__ = signature.replace(parameters=bound)  # type: ignore[attr-defined]
    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = __init__  # type: ignore[misc]
    cls.__no_type_check__ = True  # type: ignore[attr-defined]  # arguments are checked explicitly
    cls.__signature__ = signature  # type: ignore[attr-defined]
    body.describe_class(cls, signature)
    MODULES[cls.__bases__[0]] = cls
    return cls


_CALL = nnx.LinearGeneral.__call__  # observers and interceptors replace it on the class


def _as_made(part: Any, layer: Any, other: Any) -> bool:
    """Whether a projection is unchanged since `projection` made it, and so defined by its kernel.

    A replaced, derived or observed one (as by `flax.nnx.capture`) must be called instead.
    """
    return (
        type(part) is nnx.LinearGeneral
        and type(part).__call__ is _CALL
        and part.axis == (-1,)
        and not part.batch_axis
        and part.dot_general in (None, jax.lax.dot_general)
        and part.dot_general_cls is None
        and part.preferred_element_type is None
        and part.promote_dtype is promote_dtype
        and part.dtype == layer.dtype
        and part.precision == layer.precision
        and (part.bias is None) == (getattr(other, "bias", None) is None)
        and isinstance(part.kernel[...], jax.Array)
        and jnp.issubdtype(part.kernel[...].dtype, jnp.floating)
    )


def _parameter(field: Any) -> inspect.Parameter:
    kinds = inspect.Parameter
    kind = kinds.KEYWORD_ONLY if field.kw_only else kinds.POSITIONAL_OR_KEYWORD
    default = kinds.empty if field.default is dataclasses.MISSING else field.default
    return kinds(field.name, kind, default=default, annotation=field.type)


def _bind(
    name: str, signature: inspect.Signature, args: Any, options: Any
) -> types.SimpleNamespace:
    """The settings by name, including defaults."""
    for option in options:
        if option not in signature.parameters:
            close = difflib.get_close_matches(option, signature.parameters, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name} got an unexpected argument {option!r}{hint}")
    try:
        bound = signature.bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    return types.SimpleNamespace(**bound.arguments)


class NnxConstruction(Construction):
    """Creates the submodules of an NNX module, in the order in which they use the streams."""

    def __init__(self, layer: Any, given: Any) -> None:
        super().__init__(given, vars(given))
        self._layer = layer
        self._rngs: nnx.Rngs = given.rngs

    def dense(self, inputs: int, outputs: int, **options: Any) -> nnx.Linear:
        """`flax.nnx.Linear`."""
        return nnx.Linear(inputs, outputs, rngs=self._rngs, **self.linear_options(**options))

    def projection(self, inputs: Any, features: Any, axes: int = 1, **options: Any) -> Any:
        """`flax.nnx.LinearGeneral`."""
        options = {k: v for k, v in self.linear_options(**options).items() if v is not None}
        options["axis"] = tuple(range(-axes, 0))
        return nnx.LinearGeneral(inputs, features, rngs=self._rngs, **options)

    def embed(self, count: int, features: int, init: Any) -> nnx.Embed:
        """`flax.nnx.Embed`."""
        dtypes = self.take("dtype", "param_dtype")
        return nnx.Embed(count, features, embedding_init=init, rngs=self._rngs, **dtypes)

    def param(self, name: str, draw: Draw) -> nnx.Param:
        """`flax.nnx.Param`."""
        del name
        return nnx.Param(draw(self._rngs.params()))

    def late_param(self, name: str, shape: Any, draw: Callable[[Array, Any], Array]) -> None:
        """`flax.nnx.Param`."""
        setattr(self._layer, name, nnx.Param(draw(self._rngs.params(), shape)))

    def hash_key(self) -> Hash:
        """`Hash`."""
        return Hash(jax.random.key_data(self._rngs.params()))

    def discard(self, *names: str) -> None:
        """Replaces the submodules by None."""
        for name in names:
            setattr(self._layer, name, nnx.data(None))

    def layer_norm(self, features: int, *, name: str = "", **options: Any) -> LayerNorm:
        """`LayerNorm`."""
        options |= self.take("dtype", "param_dtype")
        if metadata := getattr(self.given, f"{name}_scale_metadata", None):
            options["scale_metadata"] = metadata
        return LayerNorm(features, rngs=self._rngs, **options)

    def layer(self, body: Any, *args: Any, **options: Any) -> Any:
        """The NNX module of the body."""
        options = {**self.shared(body, options), **options}
        return MODULES[body](*args, rngs=self._rngs, **options)

    def attention(self, kind: Any, *args: Any, **options: Any) -> Any:
        """The module made by `kind`."""
        make = MODULES[MultiHeadAttention] if kind is None else kind
        return make(*args, rngs=self._rngs, **options)

    def layers(self, make: Callable[[], Any], count: int, scanned: bool) -> Any:
        """A list of layers, or one layer with stacked variables."""
        every = [make() for _ in range(count)]
        return stacked(every) if scanned else nnx.List(every)

    def dropout_stream(self, rate: float | int) -> None:
        """A fork of the stream "dropout", if there are a rate and a stream."""
        keep = getattr(self.given, "keep_rngs", True)
        self._layer.rngs = nnx.data(fork_stream(self._rngs, rate) if keep else None)

    def score(self, given: Any, num_heads: int, query_depth: int, key_depth: int) -> None:
        """`ScoreParameters`."""
        self._keep_parameters("score", ScoreParameters, given, (num_heads, query_depth, key_depth))

    def positions(self, given: Any, num_heads: int, depth: int) -> None:
        """`PositionParameters`."""
        self._keep_parameters("positions", PositionParameters, given, (num_heads, depth, depth))

    def _keep_parameters(self, name: str, kind: Any, given: Any, of: tuple[int, int, int]) -> None:
        sizes = Sizes(*of, **self.take("param_dtype", "kernel_init"))
        self.keep(name, kind(given, sizes, dtype=self.given.dtype, rngs=self._rngs))

    def keep(self, name: str, part: Any) -> None:
        """An attribute of that name."""
        setattr(self._layer, name, part)
