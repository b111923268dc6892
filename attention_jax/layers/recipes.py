"""Recipes of scores: the parameters that a layer creates, and the score built from them.

A score object of `attention_jax.scores` holds its arrays. A layer creates them at initialisation,
so that they are saved and trained with its other parameters. For the sizes of a layer a recipe
defines the parameters and their initialisation; for given values it builds the score.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import scores
from attention_jax._core.axes import AnyArray, Array
from attention_jax._core.checks import check_count
from attention_jax._core.term import Term
from attention_jax.kernels.request import Result
from attention_jax.layers.arguments import check_activation
from attention_jax.scores import Score

# The values of `score=`; `recipe` raises a clear error for all others.
AnyScore = Annotated[Any, "Score | ScoreRecipe | str | None, or a function that makes a Score"]
Initializer = Callable[[Array, tuple[int, ...], Any], Array]
Draw = Callable[[Array], Array]

KERNEL_INIT: Initializer = jax.nn.initializers.lecun_normal()
BIAS_INIT: Initializer = jax.nn.initializers.zeros


class Sizes(NamedTuple):
    """The sizes of a layer that a recipe needs.

    Attributes:
        num_heads: N, query heads.
        query_depth: H, depth of one query head.
        key_depth: Hk, depth of one key head.
        param_dtype: The dtype of the parameters.
        kernel_init: The layer's initialiser for kernels `[inputs, outputs]`.
    """

    num_heads: int
    query_depth: int
    key_depth: int
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = KERNEL_INIT

    @classmethod
    def of(cls, query: Array, key: Array) -> "Sizes":
        """Those of queries `[*B, T, N, H]` and keys `[*B, S, K, Hk]`."""
        return cls(query.shape[-2], query.shape[-1], key.shape[-1])


@dataclasses.dataclass(frozen=True, repr=False)
class ScoreRecipe:
    """Base of recipes of scores whose parameters the layer creates.

    Subclasses are frozen: two layers with equal recipes have equal structure and share compiled
    functions. A recipe's repr is the call that made it.
    """

    def __repr__(self) -> str:
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }
        shown = (
            f"{k}={getattr(v, '__name__', v) if callable(v) else repr(v)}" for k, v in given.items()
        )
        name = re.sub(r"(?<=.)(?=[A-Z])", "_", type(self).__name__).lower()
        return f"{name}({', '.join(shown)})"

    def bare(self) -> "ScoreRecipe":
        """The recipe without arrays, which a layer stores."""
        return self

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The initialisers `draw(key)` of the parameters, by name."""
        del sizes
        return {}

    @property
    def adapted(self) -> tuple[str, ...]:
        """The names of states: without gradient, updated by `adapt` in training."""
        return ()

    def adapt(self, values: Mapping[str, Array], result: Result) -> dict[str, Array]:
        """The next values of the states, from a training call with statistics."""
        del values, result
        return {}

    def build(self, values: Mapping[str, Array]) -> Score:
        """The score with these values of its parameters."""
        raise NotImplementedError(f"{type(self).__name__} has no build")


def positive(raw: AnyArray) -> Array:
    """A positive scale for any raw value.

        scale = softplus(raw) + 1e-4

    It is linear for large values and its gradient is in [0, 1]: an extreme raw value cannot change
    the sign, and the gradient cannot explode as that of exp can.
    """
    return jax.nn.softplus(jnp.asarray(raw)) + _FLOOR


def positive_inverse(scale: AnyArray) -> Array:
    """The raw value for which `positive` gives `scale` (> 1e-4)."""
    shifted = jnp.asarray(scale) - _FLOOR
    return shifted + jnp.log(-jnp.expm1(-shifted))


_FLOOR = 1e-4


def drawn(init: Initializer, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An initialiser's value without the box of Flax's partitioning.

    The partition names the axes of a projection's kernel; other parameters have other axes.
    """
    value: Any = init(key, shape, dtype)
    for wrapped in ("raw_value", "value"):  # NNX's metadata, Linen's box
        value = getattr(value, wrapped, value)
    return value


def _kernels(sizes: Sizes, heads: int | None, inputs: int, outputs: int) -> Draw:
    """Draws `[inputs, outputs]`, or `[N, inputs, outputs]`, every head with the same fan-in."""

    def draw(key: Array) -> Array:
        columns = outputs if heads is None else heads * outputs
        flat = drawn(sizes.kernel_init, key, (inputs, columns), sizes.param_dtype)
        if heads is None:
            return flat
        return jnp.moveaxis(flat.reshape(inputs, heads, outputs), 1, 0)

    return draw


def _vectors(sizes: Sizes, heads: int | None, length: int) -> Draw:
    """Draws `[length]`, or one for each head, `[N, length]`, of fan-in `length`."""
    matrices = _kernels(sizes, heads, length, 1)
    return lambda key: matrices(key)[..., 0]


@dataclasses.dataclass(frozen=True, repr=False)
class Dot(ScoreRecipe):
    """The unscaled dot product; it has no parameters."""

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.dot()`."""
        del values
        return scores.dot()


@dataclasses.dataclass(frozen=True, repr=False)
class ScaledDot(ScoreRecipe):
    """The dot product times a fixed scale, 1/√H by default; it has no parameters."""

    scale: float | int | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not isinstance(self.scale, int | float | np.number):
            raise TypeError(
                f"scale must be a number, got {type(self.scale).__name__}; for one that trains "
                "give attention_jax.scores.scaled_dot an array"
            )

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.scaled_dot(scale)`."""
        del values
        return scores.scaled_dot() if self.scale is None else scores.scaled_dot(self.scale)


@dataclasses.dataclass(frozen=True, repr=False)
class General(ScoreRecipe):
    """The bilinear score, initialised to the variance of the scaled dot product."""

    shared: bool = False

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`weight`, `[N, H, Hk]`, or `[H, Hk]` where the heads share it."""
        heads = None if self.shared else sizes.num_heads
        draw = _kernels(sizes, heads, sizes.query_depth, sizes.key_depth)
        return {"weight": lambda key: draw(key) * sizes.key_depth**-0.5}

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.general(weight)`."""
        return scores.general(values["weight"])


@dataclasses.dataclass(frozen=True, repr=False)
class _Hidden(ScoreRecipe):
    """Base of the two scores with a hidden layer."""

    hidden_features: int | None = None
    shared: bool = False
    activation: Callable[[Array], Array] = jnp.tanh

    def __post_init__(self) -> None:
        if self.hidden_features is not None:
            check_count("hidden_features", self.hidden_features, 1)
        check_activation(self.activation)

    def _width(self, sizes: Sizes) -> int:
        return sizes.query_depth if self.hidden_features is None else self.hidden_features

    def _heads(self, sizes: Sizes) -> int | None:
        return None if self.shared else sizes.num_heads


@dataclasses.dataclass(frozen=True, repr=False)
class Additive(_Hidden):
    """The additive score of a two-layer network, its first layer split between query and key."""

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`w_query [N?, H, A]`, `w_key [N?, Hk, A]`, `v [N?, A]`."""
        heads, width = self._heads(sizes), self._width(sizes)
        return {
            "w_query": _kernels(sizes, heads, sizes.query_depth, width),
            "w_key": _kernels(sizes, heads, sizes.key_depth, width),
            "v": _vectors(sizes, heads, width),
        }

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.additive(w_query, w_key, v)`."""
        return scores.additive(
            values["w_query"], values["w_key"], values["v"], activation=self.activation
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Concat(_Hidden):
    """The additive score written with one weight for the concatenated query and key."""

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`weight [N?, H + Hk, A]`, `v [N?, A]`."""
        heads, width = self._heads(sizes), self._width(sizes)
        return {
            "weight": _kernels(sizes, heads, sizes.query_depth + sizes.key_depth, width),
            "v": _vectors(sizes, heads, width),
        }

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.concat(weight, v)`."""
        return scores.concat(values["weight"], values["v"], activation=self.activation)


@dataclasses.dataclass(frozen=True, repr=False)
class Cosine(ScoreRecipe):
    """Cosine similarity with a learned positive scale for each head."""

    initial_scale: float | int = 10.0

    def __post_init__(self) -> None:
        if not self.initial_scale > _FLOOR:
            raise ValueError(f"initial_scale must be above {_FLOOR}, got {self.initial_scale}")

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """`raw_scale [N]`, from which `positive` makes the scale."""
        shape, dtype = (sizes.num_heads,), sizes.param_dtype
        start = positive_inverse(jnp.asarray(self.initial_scale, jnp.float32))
        return {"raw_scale": lambda key: jnp.full(shape, start.astype(dtype))}

    def build(self, values: Mapping[str, Array]) -> Score:
        """`scores.cosine(scale)`."""
        return scores.cosine(positive(values["raw_scale"]))


@dataclasses.dataclass(frozen=True, repr=False)
class Given(ScoreRecipe):
    """The recipe of a given score or bias object: its arrays are the initial values.

    Attributes:
        structure: The tree of the object.
        names: For each leaf the name of its parameter; empty for a leaf that is not an array.
        rest: The leaves that are not arrays, which are constant.
        arrays: The arrays by name; only until the layer is initialised.
    """

    structure: Any
    names: tuple[str, ...]
    rest: tuple[Any, ...]
    arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, score: Term) -> "Given":
        """The recipe of `score`."""
        paths, structure = jax.tree_util.tree_flatten_with_path(score)
        names = tuple(
            jax.tree_util.keystr(path, simple=True, separator="_") if hasattr(leaf, "dtype") else ""
            for path, leaf in paths
        )
        leaves = [leaf for _, leaf in paths]
        rest = tuple(None if name else leaf for name, leaf in zip(names, leaves, strict=True))
        arrays = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name}
        return cls(structure, names, rest, arrays)

    def bare(self) -> "Given":
        """The recipe without the arrays."""
        return dataclasses.replace(self, arrays={})

    def parameters(self, sizes: Sizes) -> dict[str, Draw]:
        """The arrays of the score by path."""
        del sizes
        return {
            name: lambda key, array=array: jnp.asarray(array) for name, array in self.arrays.items()
        }

    def build(self, values: Mapping[str, Array]) -> Any:
        """The score with these arrays."""
        return self.structure.unflatten(
            [
                values[name] if name else leaf
                for name, leaf in zip(self.names, self.rest, strict=True)
            ]
        )


NAMED: dict[str, ScoreRecipe] = {
    "dot": Dot(),
    "scaled_dot": ScaledDot(),
    "general": General(),
    "additive": Additive(),
    "concat": Concat(),
    "cosine": Cosine(),
}


def recipe(score: AnyScore, name: str = "score") -> ScoreRecipe:
    """The recipe of a `score=` argument.

    Args:
        score: A score object, a recipe, one of the names of `NAMED`, or None for "scaled_dot".
        name: The argument's name, for messages.

    Raises:
        ValueError: If a name is unknown; the message lists the known ones.
        TypeError: If it has another type.
    """
    if score is None:
        return ScaledDot()
    if isinstance(score, ScoreRecipe):
        return score
    if isinstance(score, Score):
        return Given.of(score)
    if isinstance(score, str):
        if score not in NAMED:
            raise ValueError(f"unknown {name} {score!r}: the names are {', '.join(NAMED)}")
        return NAMED[score]
    raise TypeError(f"{name} must be a Score, a score recipe or a name, got {type(score).__name__}")


def is_factory(score: Any) -> bool:
    """Whether `score` is a function that makes a score from the layer's sizes."""
    return callable(score) and not isinstance(score, Score | ScoreRecipe)


def check_score(score: Any, name: str = "score") -> None:
    """Raises the errors of a layer's score at construction instead of at its first use."""
    if not is_factory(score):
        recipe(score, name)
