"""Both flavours behind one face: a layer's variables, and its methods as pure functions of them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx as flax_nnx

from attention_jax import linen, nnx

MODULES = {"nnx": nnx, "linen": linen}


class Layer:
    """A layer of either flavour.

    Attributes:
        module: The module itself.
        variables: Its variables, in Linen's tree; both flavours' are those of one seed and differ.
    """

    def __init__(self, module: Any, variables: Mapping[str, Any]) -> None:
        self.module = module
        self.variables = variables

    @property
    def params(self) -> Any:
        """The parameters."""
        return self.variables["params"]

    def replace(self, params: Any) -> "Layer":
        """The layer with other parameters."""
        return Layer(self.module, {**self.variables, "params": params})

    def apply(
        self,
        variables: Any,
        *inputs: Any,
        method: str = "__call__",
        key: Any = None,
        **options: Any,
    ) -> Any:
        """A method; `key` is where dropout keys come from."""
        if isinstance(self.module, flax_nnx.Module):
            streams = {} if key is None else {"rngs": flax_nnx.Rngs(dropout=key)}
            module = linen.to_nnx(variables, self.module)
            return getattr(module, method)(*inputs, **streams, **options)
        streams = {} if key is None else {"rngs": {"dropout": key}}
        named = getattr(self.module, method)
        return self.module.apply(variables, *inputs, method=named, **streams, **options)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """`apply` with the present variables, compiled."""
        run = jax.jit(lambda variables, inputs: self.apply(variables, *inputs, **options))
        return run(self.variables, inputs)


class Made:
    """A module of one flavour, made by `make(library, **options)`, with the parameters of NNX's.

    Attributes:
        package: `attention_jax.nnx` or `attention_jax.linen`.
        model: The module.
        given: What functions of a model take first: the model, in Linen with its variables.
    """

    def __init__(self, flavour, make, change=None, seed=0):
        twin = flax_nnx.jit(lambda: make(nnx, rngs=flax_nnx.Rngs(seed)))()
        if change is not None:
            change(twin)
        self.given: tuple
        self.package, self.model, self.given = nnx, twin, (twin,)
        if flavour == "linen":
            self.package, self.model = linen, make(linen)
            self.given = (self.model, linen.from_nnx(twin))

    def __call__(self, *arrays, method="__call__", **options):
        if self.package is nnx:
            return getattr(self.model, method)(*arrays, **options)
        return self.model.apply(self.given[1], *arrays, method=method, **options)

    def decode(self, name, *arrays, **options):
        """`greedy_decode` and its like."""
        return getattr(self.package, name)(*self.given, *arrays, **options)


class Flavour(str):
    """A flavour of modules: its name."""

    @property
    def modules(self) -> Any:
        """`attention_jax.nnx` or `attention_jax.linen`."""
        return MODULES[self]

    def module(self, name: str, *args: Any, seed: int = 0, **options: Any) -> Any:
        """A module that is only constructed."""
        streams = {"rngs": flax_nnx.Rngs(seed)} if self == "nnx" else {}
        return getattr(self.modules, name)(*args, **options, **streams)

    def layer(
        self, name: str, *args: Any, inputs: Any, seed: int = 0, how: Any = None, **options: Any
    ) -> Layer:
        """A layer with its variables.

        Args:
            name: The name of its class.
            *args: The constructor's.
            inputs: Inputs of the shapes that calls will have.
            seed: For the parameters.
            how: Options of the call that initialises a Linen module.
            **options: The constructor's.
        """
        module = self.module(name, *args, seed=seed, **options)
        if self == "nnx":
            return Layer(module, linen.from_nnx(module))
        init = jax.jit(functools.partial(module.init, **(how or {})))
        return Layer(module, init(jax.random.key(seed), *inputs))
