"""The base class of bodies, and the functions that copy a body's methods into a module."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, dataclass_transform

import jax.numpy as jnp

from attention_jax._core.checks import check_count
from attention_jax.layers import docstrings
from attention_jax.layers.checks import check_settings
from attention_jax.layers.recipes import KERNEL_INIT, Initializer

Class = TypeVar("Class", bound=type)
Out = TypeVar("Out")
P = ParamSpec("P")


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field,))
def settings(cls: Class) -> Class:
    """Declares a body's annotated attributes as settings, the arguments of every constructor.

    Order, defaults and `dataclasses.KW_ONLY` behave as in a dataclass.
    """
    return dataclasses.dataclass(eq=False, repr=False)(cls)


class Body:
    """Base of the bodies.

    A flavour's module derives from a body and from the flavour's base, in this order; that base
    defines the methods that raise here. Public methods take `**random`, the flavour's arguments for
    a random key, and pass it to the methods of submodules and to `_dropout_key`.
    """

    _counts: ClassVar[tuple[str, ...]] = ()  # the settings that are positive ints, or None
    _passed_on: ClassVar[tuple[str, ...]] = ()  # the settings that only construction uses
    _with_arrays: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # getters of array settings
    _first: ClassVar[str | None] = None  # builds the submodule that checks settings
    _random: ClassVar[Mapping[str, str]] = {}  # the arguments in `random`, with descriptions
    _arguments: ClassVar[Mapping[str, str]] = {}  # descriptions of shared arguments
    _flag_hint: ClassVar[str] = ""  # how to set `deterministic`, for messages

    def _check(self, given: Any) -> None:
        """Raises if a setting is invalid; `given` has the settings as attributes."""
        for name in self._counts:
            if (value := getattr(given, name)) is not None or not _may_be_none(type(self), name):
                check_count(name, value, 1)
        check_settings(**{name: getattr(given, name) for name in setting_names(type(self))})

    def _build(self, make: Any) -> None:
        """Makes the submodules and parameters with `make`, a `Construction`."""
        raise NotImplementedError(f"{type(self).__name__} has no _build")

    def _part(self, name: str) -> Any:
        """The submodule that `Construction.keep` made under the name of a setting."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _unbound(self, name: str, build: Callable[[Any], Any]) -> Any:
        """The submodule `name`, which `build(make)` makes, for methods that need no variables."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _each(
        self, call: Callable[..., Any], carry: Any, items: Any = None, **random: Any
    ) -> tuple[Any, Any]:
        """Scans `carry, extra = call(layer, carry, item, **random)` over `layers`.

        Args:
            call: The function of one layer.
            carry: The first layer's input.
            items: One for each layer: a sequence, or stacked where the layers are scanned.
            **random: The flavour's arguments.

        Returns:
            The carry after the last layer, and the extras: a tuple, or stacked where scanned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _linear(self, part: Any, x: Any, features: tuple[int, ...], known: Any = None) -> Any:
        """The output `[..., *features]` of a projection that `Construction.projection` made.

        Args:
            part: The projection, or its replacement.
            x: Its input.
            features: The last axes of the output.
            known: The output as a `Projected`, if a fused product has computed it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _kernels(self, parts: Any, inputs: tuple[int, ...], features: Any) -> Any:
        """Kernel and bias of each projection; None if one of them was replaced.

        Args:
            parts: The projections.
            inputs: The last axes of their common input.
            features: The last axes of each output.
        """
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _late(self, name: str, shape: tuple[int, ...]) -> Any:
        """The parameter that `Construction.late_param` made, of a known shape."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _stored_cache(self) -> Any:
        """The internal cache of a layer with `decode`; None if there is none yet."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _store_cache(self, cache: Any) -> None:
        """Stores the cache in the module."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _sow_weights(self, weights: Any) -> None:
        """Adds weights to the intermediates, as "attention_weights"."""
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _dropout_key(self, name: str, training: Any, **random: Any) -> Any:
        """A random key for dropout, from the arguments of the flavour or from its streams.

        Args:
            name: The layer's name, for error messages.
            training: Whether the key is needed, possibly traced.
            **random: The flavour's arguments.

        Returns:
            The key; None if there is none and `training` is traced.

        Raises:
            ValueError: If the key is needed and there is none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no flavour")

    def _check_random(self, random: Mapping[str, Any]) -> None:
        """Raises a TypeError if `random` holds an unknown argument."""
        if unknown := set(random) - set(self._random):
            name = min(unknown)
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")


@settings
class LinearSettings(Body):
    """A layer that contains linear layers.

    Args:
        dtype: Dtype of the computation; None follows the inputs and the parameters.
        param_dtype: Dtype of the parameters.
        precision: As in `jax.lax.Precision`.
        kernel_init: Initialiser of the kernels.
        bias_init: Initialiser of the biases.
        use_bias: Whether the linear layers have biases.
        implementation: As in `attention_jax.attend`.
        block_size: As in `attention_jax.attend`.
    """

    _: dataclasses.KW_ONLY
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Initializer = KERNEL_INIT


def arguments_of(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., Out]], Callable[Concatenate[Any, P], Out]]:
    """Declares that a method has the arguments of another method and their descriptions."""

    def declare(function: Any) -> Any:
        own: Any = inspect.signature(function)
        signature = inspect.signature(method)
        function.__signature__ = signature.replace(return_annotation=own.return_annotation)
        function.described_by = method
        return function

    return declare


def setting_names(cls: type) -> list[str]:
    """The settings of a body, or of a module that derives from one."""
    return [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]


def _may_be_none(cls: Any, name: str) -> bool:
    return types.NoneType in typing.get_args(cls.__dataclass_fields__[name].type)


def is_body(cls: type) -> bool:
    """Whether a class is a body and not a module of a flavour."""
    return issubclass(cls, Body) and not hasattr(cls, "_flavour")


def adopt_methods(cls: type) -> None:
    """Copies the public methods of a module's bodies into the module's class.

    Linen manages state only in methods that are defined in the class itself. The copies have the
    flavour's arguments in their signatures and complete docstrings.
    """
    known: dict[str, str] = {**cls._arguments, **cls._random}  # type: ignore[attr-defined]
    for base in reversed(cls.__mro__):
        if is_body(base) and "__call__" in vars(base):
            known |= docstrings.arguments(vars(base)["__call__"].__doc__)
    names = {name for base in cls.__mro__ if is_body(base) for name in vars(base)}
    for name in sorted(names):
        provider = next(base for base in cls.__mro__ if name in vars(base))
        function = vars(provider)[name]
        public = name == "__call__" or not name.startswith("_")
        setting = name in getattr(cls, "__dataclass_fields__", ())
        method = isinstance(function, types.FunctionType) and public and not setting
        if method and is_body(provider):
            setattr(cls, name, _copy(function, cls, known))


def _copy(function: Callable[..., Any], cls: Any, known: Mapping[str, str]) -> Callable[..., Any]:
    source: Any = function
    copy = types.FunctionType(
        source.__code__,
        source.__globals__,
        source.__name__,
        source.__defaults__,
        source.__closure__,
    )
    copy.__kwdefaults__ = source.__kwdefaults__
    copy.__dict__.update(source.__dict__)
    copy.__annotations__ = source.__annotations__
    copy.__module__ = source.__module__
    copy.__qualname__ = f"{cls.__qualname__}.{source.__name__}"
    signature: Any = inspect.signature(function)
    parameters = dict(signature.parameters)
    if parameters.pop("random", None) is not None:
        kind = inspect.Parameter.KEYWORD_ONLY
        for name in cls._random:
            parameters[name] = inspect.Parameter(name, kind, default=None, annotation=Any)
        copy.__signature__ = signature.replace(parameters=parameters.values())  # type: ignore[attr-defined]
    if hasattr(source, "described_by"):
        known = {**known, **docstrings.arguments(source.described_by.__doc__)}
    copy.__doc__ = docstrings.completed(source.__doc__, parameters, known)
    return copy


def describe_class(cls: Any, signature: inspect.Signature) -> None:
    """Completes the docstring of a module: its body's, with the flavour's additions."""
    bases = [base for base in cls.__mro__[1:] if issubclass(base, Body)]
    known: dict[str, str] = {}
    for base in reversed(bases):
        known |= docstrings.arguments(base.__doc__)
    own = next(base.__doc__ for base in bases if is_body(base))
    cls.__doc__ = docstrings.completed(own, signature.parameters, known, vars(cls).get("__doc__"))
