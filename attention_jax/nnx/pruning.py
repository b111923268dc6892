"""Attention with fewer heads: modules that are smaller, and say the same."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from attention_jax._modules.places import GivenBias
from attention_jax._modules.pruning import (
    Arrays,
    Plan,
    clusters,
    make_plan,
    merge_projections,
    prune_projections,
    prune_term,
)
from attention_jax._modules.recipes import Given
from attention_jax.masks.data import FromArray
from attention_jax.masks.mask import Mask, Not, Pair
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.places import PositionParameters

Model = TypeVar("Model", bound=nnx.Module)
_PARTS = ("query", "key", "value", "out")


def prune_heads(model: Model, heads: Mapping[str, Sequence[int]] | Sequence[int]) -> Model:
    """A copy of a model with some heads gone, whose output is as if they put out 0.

    Projections, score and positions keep the other heads' parameters. Key/value heads that no
    query head uses any more go too; where groups are left with unequal numbers of query heads,
    every query head gets a key/value head of its own.

    Args:
        model: a `MultiHeadAttention`, or any NNX model that has some; it stays as it is.
        heads: for each attention by path, as `capture` names them, the heads that go; for a single
            attention the heads alone.

    Returns:
        A model of the same class. Optimiser states do not fit it: begin them anew.

    Raises:
        ValueError: a path that leads to no `MultiHeadAttention`, a head that is not there, an
            attention without a head left.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import MultiHeadAttention, prune_heads
        >>> layer = MultiHeadAttention(4, 16, score="additive", rngs=nnx.Rngs(0))
        >>> small = prune_heads(layer, [0, 2])
        >>> small.num_heads, small.query.kernel.shape, small(jnp.ones((3, 16))).shape
        (2, (16, 2, 4), (3, 16))

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
        Voita et al. 2019, "Analyzing Multi-Head Self-Attention", arXiv:1905.09418.
    """
    copy = nnx.clone(model)
    for layer, pruned in _layers(copy, heads, "heads"):
        plan = make_plan(layer.num_heads, layer.num_kv_heads, pruned)
        _become(layer, plan, prune_projections(_arrays(layer), plan))
    return copy


def merge_similar_heads(model: Model, similarity: Any, *, threshold: float = 0.98) -> Model:
    """A copy of a model in which heads with like maps are one.

    The first of a group looks for all of it; its value and output kernels become the matrices of
    that rank which come closest to what the group's added up to. Where the maps are equal and the
    sum has no higher rank, the output is the same.

    Args:
        model: a `MultiHeadAttention`, or any NNX model that has some; it stays as it is.
        similarity: for each attention by path `[*B, N, N]`, or a `Capture` made with
            `similarity=True`; for a single attention the array alone.
        threshold: from which cosine on two heads are alike.

    Returns:
        A model of the same class, every query head of a merged attention with a key/value head of
        its own.

    Raises:
        ValueError: as `prune_heads`; a capture without similarity.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    if isinstance(similarity, Mapping):
        similarity = {path: getattr(x, "similarity", x) for path, x in similarity.items()}
        if any(x is None for x in similarity.values()):
            raise ValueError("similarity: the capture has none; capture(..., similarity=True)")
    copy = nnx.clone(model)
    for layer, similar in _layers(copy, similarity, "similarity"):
        shape = np.shape(similar)
        if shape[-2:] != (layer.num_heads, layer.num_heads):
            raise ValueError(
                f"similarity has shape {list(shape)} but must be [*B, N, N] with N = "
                f"{layer.num_heads}"
            )
        groups = clusters(similar, threshold)
        pruned = [n for group in groups for n in group[1:]]
        if pruned:
            plan = make_plan(layer.num_heads, layer.num_kv_heads, pruned, apart=True)
            _become(layer, plan, merge_projections(_arrays(layer), groups, plan))
    return copy


def _layers(model: Any, given: Any, name: str) -> list[tuple[MultiHeadAttention, Any]]:
    if not isinstance(given, Mapping):
        given = {"": given}
    elif isinstance(model, MultiHeadAttention):  # a capture names it by its class
        given = {"" if path == type(model).__name__ else path: x for path, x in given.items()}
    found = []
    for path, x in given.items():
        layer: Any = model
        for step in path.split("/") if path else ():
            try:
                layer = layer[int(step)] if step.isdigit() else getattr(layer, step)
            except (AttributeError, IndexError, KeyError, TypeError):
                layer = None
                break
        if not isinstance(layer, MultiHeadAttention):
            raise ValueError(f"{name}: {path!r} leads to no MultiHeadAttention")
        found.append((layer, x))
    return found


def _arrays(layer: MultiHeadAttention) -> Arrays:
    parts = {part: getattr(layer, part) for part in _PARTS}
    return {
        name: {"kernel": part.kernel[...]} | ({} if part.bias is None else {"bias": part.bias[...]})
        for name, part in parts.items()
    }


def _become(layer: MultiHeadAttention, plan: Plan, arrays: Arrays) -> None:
    """Makes the layer one with the heads of the plan, and these projections."""
    count, kept = layer.num_heads, plan.kept
    _prune_score(layer, kept)
    _prune_positions(layer, kept)
    if layer.mask is not None:
        layer.mask = nnx.data(_prune_mask(layer.mask, count, kept))
    for name, new in arrays.items():
        part = getattr(layer, name)
        part.kernel.set_value(new["kernel"])
        if part.bias is not None:
            part.bias.set_value(new["bias"])
    layer.query.out_features = (len(kept), layer.head_dim)
    layer.key.out_features = (len(plan.kv), layer.head_dim)
    layer.value.out_features = (len(plan.kv), layer.value_dim)
    layer.out.in_features = (len(kept), layer.value_dim)
    layer.num_heads, layer.num_kv_heads = len(kept), len(plan.kv)
    layer.qkv_features = len(kept) * layer.head_dim
    layer._forget()  # a cache of keys of the old heads


def _prune_score(layer: MultiHeadAttention, kept: Sequence[int]) -> None:
    score = layer.score

    def build(values: dict[str, Any], heads: int) -> Any:
        return score.recipe.build(values)

    new = prune_term(build, score.values(), layer.num_heads, kept, layer.head_dim)
    if new is None:
        raise ValueError(f"cannot tell which parameters of {score()!r} belong to which head")
    for name, value in new.items():
        _set(getattr(score, name), value)


def _prune_positions(layer: MultiHeadAttention, kept: Sequence[int]) -> None:
    places = layer.positions
    assert places is not None  # a layer with projections has a scheme, if an empty one
    if (bias := places.bias()) is not None:
        given, depth = layer.num_heads, layer.head_dim
        new = prune_term(places.recipe.bias, places.values(), given, kept, depth)
        if new is None:  # what follows from the number of heads becomes an object with its arrays
            fixed = Given.of(bias)
            new = prune_term(lambda x, _: fixed.build(x), fixed.arrays, given, kept, depth)
            if new is None:
                raise ValueError(f"cannot tell which arrays of {bias!r} belong to which head")
            _hold(places, fixed, new)
        else:
            for name, value in new.items():
                _set(getattr(places, name), value)
    places.num_heads = len(kept)


def _hold(places: PositionParameters, fixed: Given, values: Mapping[str, Any]) -> None:
    """The scheme becomes a given bias; its arrays do not train, as they did not before."""
    places.recipe = GivenBias(fixed.bare())
    places.names = tuple(values)
    for name, value in values.items():
        setattr(places, name, nnx.Variable(value))


def _set(variable: Any, value: Any) -> None:
    variable.set_value(value.astype(variable.dtype))


def _prune_mask(mask: Mask, count: int, kept: Sequence[int]) -> Mask:
    """The mask, its arrays `[*B, N, T, S]` without the heads that go."""
    if isinstance(mask, Pair):
        return type(mask)(
            _prune_mask(mask.first, count, kept), _prune_mask(mask.second, count, kept)
        )
    if isinstance(mask, Not):
        return Not(_prune_mask(mask.mask, count, kept))
    if isinstance(mask, FromArray) and mask.array.ndim > 2 and mask.array.shape[-3] == count:
        return FromArray(mask.array[..., np.asarray(kept), :, :])
    return mask
