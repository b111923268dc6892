"""Attention with fewer heads: smaller modules and their variables, which say the same."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import linen as nn
from flax.core import meta

from attention_jax._modules import places, recipes
from attention_jax._modules.pruning import (
    Arrays,
    Plan,
    apart,
    by_attention,
    by_layer,
    check_linear,
    clusters,
    in_layers,
    make_plans,
    merge_projections,
    prune_mask,
    prune_projections,
    prune_term,
    together,
)
from attention_jax._modules.recipes import Given
from attention_jax.linen.attention import MultiHeadAttention
from attention_jax.linen.fewer import attention_at, with_fields
from attention_jax.linen.scores import is_factory

Model = TypeVar("Model", bound=nn.Module)
_PARTS = ("query", "key", "value", "out")


def prune_heads(
    module: Model,
    variables: Mapping[str, Any],
    heads: Mapping[str, Sequence[int]] | Sequence[int],
) -> tuple[Model, dict[str, Any]]:
    """A smaller model and its variables, whose output is as if the other heads put out 0.

    Key/value heads that no query head uses any more go too; where groups are left with unequal
    numbers of query heads, every query head gets a key/value head of its own.

    Args:
        module: a `MultiHeadAttention`, or a module whose `setup` makes some, at any depth.
        variables: its variables, `{"params": ...}`; caches among them are left out.
        heads: for each attention by path, as `capture` names them, the heads that go; for a single
            attention the heads alone. Of scanned layers as many go in each; a path without a
            number is for all of them.

    Returns:
        The module and its variables. A model with attention below it is of a subclass of its own,
        which is used through `apply` and `init`.

    Raises:
        ValueError: a path that leads to no `MultiHeadAttention`, a head that is not there, an
            attention without a head left, scanned layers that would not be of one shape.
        NotImplementedError: a score made by a function, projections with other arrays than a kernel
            and a bias.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerEncoder, prune_heads
        >>> model, x = TransformerEncoder(2, 4, 16, 32), jnp.ones((3, 16))
        >>> variables = model.init(jax.random.key(0), x)
        >>> small, fewer = prune_heads(model, variables, {"layers_1/self_attention": [0, 2]})
        >>> fewer["params"]["layers_1"]["self_attention"]["query"]["kernel"].shape
        (16, 2, 4)
        >>> small.apply(fewer, x).shape
        (3, 16)

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
    """

    def prune(layer: _Layer, given: Mapping[int | None, Any]) -> _Smaller:
        pruned = by_layer(given, layer.params["query"]["kernel"], "heads", layer.path, ())
        plans = make_plans(*layer.counts, pruned, layer.path)
        return layer.smaller(plans, lambda arrays, i: prune_projections(arrays, plans[i]))

    return _each(module, variables, heads, "heads", prune)


def merge_similar_heads(
    module: Model,
    variables: Mapping[str, Any],
    similarity: Any,
    *,
    threshold: float = 0.98,
) -> tuple[Model, dict[str, Any]]:
    """A smaller model and its variables, in which heads with like maps are one.

    The first of a group looks for all of it; its value and output kernels become the matrices of
    that rank which come closest to what the group's added up to.

    Args:
        module: as in `prune_heads`.
        variables: as in `prune_heads`.
        similarity: for each attention by path `[*B, N, N]`, or a `Capture` made with
            `similarity=True`; for a single attention the array alone.
        threshold: from which cosine on two heads are alike.

    Returns:
        The module and its variables, as they were where no two heads are alike.

    Raises:
        ValueError: as `prune_heads`; a capture without similarity.
        NotImplementedError: as `prune_heads`.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    if isinstance(similarity, Mapping):
        similarity = {path: getattr(x, "similarity", x) for path, x in similarity.items()}
        if any(x is None for x in similarity.values()):
            raise ValueError("similarity: the capture has none; capture(..., similarity=True)")

    def merge(layer: _Layer, given: Mapping[int | None, Any]) -> _Smaller | None:
        kernel, (count, kv) = layer.params["query"]["kernel"], layer.counts
        groups = []
        for similar in by_layer(given, kernel, "similarity", layer.path, np.eye(count)):
            shape = np.shape(similar)
            if shape[-2:] != (count, count):
                raise ValueError(
                    f"similarity has shape {list(shape)} but must be [*B, N, N] with N = {count}"
                )
            groups.append(clusters(similar, threshold))
        pruned = [[n for group in each for n in group[1:]] for each in groups]
        if not any(pruned):
            return None
        plans = make_plans(count, kv, pruned, layer.path, apart=True)
        return layer.smaller(
            plans, lambda arrays, i: merge_projections(arrays, groups[i], plans[i])
        )

    return _each(module, variables, similarity, "similarity", merge)


_Smaller = tuple[dict[str, Any], dict[str, Any]]  # fields of the module, and parameters


@dataclasses.dataclass(frozen=True)
class _Layer:
    """An attention in a model: its path, the module as it was written down, its parameters."""

    path: str
    module: MultiHeadAttention
    params: dict[str, Any]

    @property
    def counts(self) -> tuple[int, int]:
        """N and K."""
        return tuple(self.params[part]["kernel"].shape[-2] for part in ("query", "key"))  # type: ignore[return-value]

    @property
    def scanned(self) -> bool:
        """Whether the parameters have an axis of layers in front."""
        return self.params["query"]["kernel"].ndim == 4

    def smaller(self, plans: Sequence[Plan], project: Callable[[Arrays, int], Arrays]) -> _Smaller:
        """The fields and parameters with the heads of the plans."""
        projections = {part: self.params[part] for part in _PARTS}
        arrays = in_layers(project, projections, len(plans), scanned=self.scanned)
        depth, value_depth = (arrays[part]["kernel"].shape[-1] for part in ("query", "value"))
        score, its = self._score(plans, depth)
        where, own = self._positions(plans, depth)
        fields = {
            "num_heads": len(plans[0].kept),
            "num_kv_heads": len(plans[0].kv),
            "qkv_features": len(plans[0].kept) * depth,
            "value_features": len(plans[0].kept) * value_depth,
            "out_features": arrays["out"]["kernel"].shape[-1],
            "score": score,
            "positions": where,
            "mask": self._mask(plans),
        }
        new: dict[str, Any] = {**self.params, **arrays}
        for name, values in (("score", its), ("positions", own)):
            new.pop(name, None)
            if values:
                new[name] = values
        return fields, new

    def _score(self, plans: Sequence[Plan], depth: int) -> tuple[Any, dict[str, Any]]:
        given, count = self.module.score, self.counts[0]
        recipe = recipes.recipe(given)  # type: ignore[arg-type]
        held: list[Any] = []

        def fewer(values: dict[str, Any], i: int) -> dict[str, Any]:
            whole, kept = _constants(recipe, values), plans[i].kept
            new = prune_term(lambda x, _: recipe.build(x), whole, count, kept, depth)
            if new is None:
                raise ValueError(f"cannot tell which parameters of {given!r} belong to which head")
            held.append(new)
            return _trained(new, values)

        values = self.params.get("score", {})
        its = in_layers(fewer, values, len(plans), scanned=self.scanned)
        _check_alike(held, its, self.path)
        return (recipe.build(held[0]) if isinstance(recipe, Given) else given), its

    def _positions(self, plans: Sequence[Plan], depth: int) -> tuple[Any, dict[str, Any]]:
        given, count = self.module.positions, self.counts[0]
        recipe = places.recipe(given)
        constants = getattr(recipe, "given", None)
        values = self.params.get("positions", {})
        parts = apart(values, len(plans), scanned=self.scanned)
        every = [_constants(constants, part) for part in parts]
        biases = [bias for x in every if (bias := recipe.bias(x, count)) is not None]
        if not biases:
            return given, {}
        new = [
            prune_term(recipe.bias, whole, count, plan.kept, depth)
            for whole, plan in zip(every, plans, strict=True)
        ]
        if not (isinstance(recipe, places.GivenBias) or any(x is None for x in new)):
            own = [_trained(x, values) for x in new if x is not None]
            return given, together(own, scanned=self.scanned)
        fixed = Given.of(biases[0])
        new = [
            prune_term(lambda x, _: fixed.build(x), Given.of(bias).arrays, count, plan.kept, depth)
            for bias, plan in zip(biases, plans, strict=True)
        ]
        held = [x for x in new if x is not None]
        if len(held) < len(plans):
            raise ValueError(f"cannot tell which arrays of {biases[0]!r} belong to which head")
        # An object's floating arrays are parameters: what followed from the number of heads trains
        # now.
        own = [
            {n: x for n, x in each.items() if np.issubdtype(np.dtype(x.dtype), np.floating)}
            for each in held
        ]
        _check_alike(held, own[0], self.path)
        return fixed.build(held[0]), together(own, scanned=self.scanned)

    def _mask(self, plans: Sequence[Plan]) -> Any:
        mask, count = self.module.mask, self.counts[0]
        if mask is None:
            return None
        every = [prune_mask(mask, count, plan.kept) for plan in plans]
        leaves = [dict(enumerate(jax.tree.leaves(x))) for x in every]
        _check_alike(leaves, {}, self.path)
        return every[0]


def _check_alike(held: Sequence[Mapping[Any, Any]], trained: Mapping[str, Any], path: str) -> None:
    """Refuses arrays that scanned layers share, being no variables, and would need of their own."""
    for other in held[1:]:
        for name, x in other.items():
            if name not in trained and not np.array_equal(x, held[0][name]):
                raise NotImplementedError(
                    f"{path!r}: scanned layers share an array with an entry for each head; let the "
                    "same heads go in each, or build the model with scan_layers=False"
                )


def _each(
    module: Model,
    variables: Mapping[str, Any],
    given: Any,
    name: str,
    prune: Callable[[_Layer, Mapping[int | None, Any]], _Smaller | None],
) -> tuple[Model, dict[str, Any]]:
    """The model with every attention that is given by path made smaller."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a Linen module, got {type(module).__name__}")
    if "params" not in variables:
        raise ValueError('variables must hold "params"')
    if not isinstance(given, Mapping):
        given = {"": given}
    elif isinstance(module, MultiHeadAttention):  # a capture names it by its class
        given = {"" if path == type(module).__name__ else path: x for path, x in given.items()}
    params: dict[str, Any] = meta.unbox(variables["params"])
    fields: dict[str, dict[str, Any]] = {}
    for path, own in by_attention(given).items():
        layer = attention_at(module, path, name)
        if is_factory(layer.score):
            raise NotImplementedError(
                f"{path!r}: a score made by a function: give the score itself"
            )
        its = dict(_at(params, path))
        check_linear(path, {part: its.get(part, {}) for part in _PARTS})
        made = prune(_Layer(path, layer, its), own)
        if made is not None:
            fields[path], new = made
            params = _with(params, path.split("/") if path else [], new)
    kept = {name: part for name, part in variables.items() if name not in ("params", "cache")}
    return with_fields(module, fields), {**kept, "params": params}


def _at(params: Any, path: str) -> Any:
    for step in path.split("/") if path else ():
        params = params[step]
    return params


def _with(tree: Mapping[str, Any], path: Sequence[str], new: Any) -> Any:
    """The tree with another branch there."""
    if not path:
        return new
    return {**tree, path[0]: _with(tree[path[0]], path[1:], new)}


def _constants(recipe: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The present values, with those arrays of an object that are no parameters."""
    return {**(recipe.arrays if isinstance(recipe, Given) else {}), **values}


def _trained(new: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in new.items() if name in values}
