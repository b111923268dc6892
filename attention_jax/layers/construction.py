"""The interface by which a body creates submodules, parameters and states."""

from collections.abc import Callable, Iterable
from typing import Any

from attention_jax._core.axes import Array
from attention_jax.layers.body import setting_names

Draw = Callable[[Array], Array]


class Construction:
    """Makes the parts of one module; each flavour implements it.

    Sizes are given if they are known. A flavour that infers them from the inputs ignores them.

    Attributes:
        given: An object with all settings of the module as attributes.
        names: The names of the settings.
    """

    def __init__(self, given: Any, names: Iterable[str]) -> None:
        self.given = given
        self.names = frozenset(names)

    def take(self, *names: str) -> dict[str, Any]:
        """Settings by name, to pass on; those that the module does not have are left out."""
        return {name: getattr(self.given, name) for name in names if name in self.names}

    def linear_options(self, *, output: bool = False, **options: Any) -> dict[str, Any]:
        """The options of the module's linear layers; `options` override them.

        Args:
            output: Whether it is the module's output layer, which may have separate initialisers
                and metadata.
            **options: Overrides.
        """
        found = self.take("dtype", "param_dtype", "precision", "use_bias")
        for name in ("kernel_init", "bias_init", "kernel_metadata", "bias_metadata"):
            own = getattr(self.given, f"out_{name}", None) if output else None
            found |= {name: own} if own else self.take(name)
        return {**found, **options}

    def dense(self, inputs: int, outputs: int, **options: Any) -> Any:
        """`x W + b` on the last axis."""
        raise NotImplementedError

    def projection(
        self, inputs: Any, features: tuple[int, ...] | None, axes: int = 1, **options: Any
    ) -> Any:
        """A linear function of the last `axes` axes, which `Body._linear` calls.

        Its kernel is `[*inputs, *features]`, initialised with the fan of a matrix; without a size
        the features are those of the call.
        """
        raise NotImplementedError

    def embed(self, count: int, features: int, init: Any) -> Any:
        """An embedding of `count` tokens."""
        raise NotImplementedError

    def param(self, name: str, draw: Draw) -> Any:
        """A parameter initialised by `draw(key)`; its array is `parameter[...]`."""
        raise NotImplementedError

    def late_param(
        self, name: str, shape: tuple[int, ...] | None, draw: Callable[[Array, Any], Array]
    ) -> None:
        """The parameter `draw(key, shape)`, for `Body._late`; None: the shape is not known yet."""
        raise NotImplementedError

    def hash_key(self) -> Any:
        """A constant random key; its data are `key[...]`."""
        raise NotImplementedError

    def discard(self, *names: str) -> None:
        """Removes submodules that the module does not use."""
        raise NotImplementedError

    def layer_norm(self, features: int | None, *, use_bias: bool = True, name: str = "") -> Any:
        """LayerNorm over the last axis; `name` is its name, where it has metadata of its own."""
        raise NotImplementedError

    def layer(self, body: Any, *args: Any, **options: Any) -> Any:
        """The module of this flavour for a body.

        Settings that it shares with the module under construction are passed by name, unless
        `options` overrides them.
        """
        raise NotImplementedError

    def attention(self, kind: Any, *args: Any, **options: Any) -> Any:
        """`kind(*args, **options)`; None is `MultiHeadAttention`."""
        raise NotImplementedError

    def layers(self, make: Callable[[], Any], count: int, scanned: bool) -> Any:
        """`count` layers, for `Body._each`."""
        raise NotImplementedError

    def dropout_stream(self, rate: float | int) -> None:
        """A stream of dropout keys for the module, where the flavour keeps one."""
        raise NotImplementedError

    def score(
        self, given: Any, num_heads: int, query_depth: int | None, key_depth: int | None
    ) -> None:
        """The parameters of a score, as the part "score"."""
        raise NotImplementedError

    def positions(self, given: Any, num_heads: int, depth: int | None) -> None:
        """The parameters of a position scheme, as the part "positions"."""
        raise NotImplementedError

    def shared(self, body: Any, given: Any) -> dict[str, Any]:
        """The settings of `body` that the module under construction has, bar those `given`."""
        return self.take(*(name for name in setting_names(body) if name not in given))

    def keep(self, name: str, part: Any) -> None:
        """Registers `part` as a submodule; its name may be that of a setting, see `Body._part`."""
        raise NotImplementedError
